"""The subscribers of those partitions of a stream that are read. Each is opened and closed on its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from delta_prop.client.change_signal import ChangeSignal
from delta_prop.client.service_identity import LogMismatch
from delta_prop.client.subscriber import Subscriber
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from delta_prop.client.positions import StartPosition
    from delta_prop_wire.frames import Start

T = TypeVar("T")


class PartitionReaders:
    """The subscribers of the assigned partitions, and where the others continue.

    `turns`: the assigned partitions, the one that is served next first. `changes`: notified when one of them
    has something.
    *Resources*: a task for each assigned partition, in `tasks`, until `close`.
    """

    def __init__(
        self,
        new_subscriber: partial[Subscriber],
        starts: Sequence[StartPosition | None],
        *,
        is_grouped: bool,
        tasks: TaskGroup,
    ) -> None:
        """`new_subscriber`: lacks the partition. `starts`: of all partitions. `is_grouped`: a group stores
        the cursors.
        """
        self.turns: deque[int] = deque()
        self.changes = ChangeSignal()
        self._new_subscriber = new_subscriber
        self._starts = list(starts)
        self._is_grouped = is_grouped
        self._tasks = tasks
        self._subscribers: dict[int, Subscriber] = {}
        self._ends: dict[int, anyio.Event] = {}  # ends the task of each

    @property
    def count(self) -> int:
        """The number of partitions of the stream."""
        return len(self._starts)

    def check(self, partition: int) -> int:
        """Return the number of a partition. Raises UsageError if the stream has no such partition."""
        last = self.count - 1
        if not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition <= last:
            raise UsageError(f"partition {partition!r:.60}: give one from 0 to {last}")
        return partition

    def assign(self, partitions: Sequence[int]) -> None:
        """Read only these partitions; without any, all. Raises UsageError, and changes nothing."""
        wanted = set(map(self.check, partitions)) or set(range(self.count))
        for partition in self._subscribers.keys() - wanted:
            cursor = self._subscribers.pop(partition).cursor
            self._ends.pop(partition).set()
            if cursor is not None and not self._is_grouped:
                self._starts[partition] = cursor
        for partition in sorted(wanted - self._subscribers.keys()):
            self._open(partition)
        self.turns = deque(sorted(wanted))
        self.changes.notify()

    def get(self, partition: int) -> Subscriber:
        """Return the subscriber of a partition. Raises UsageError if it is not assigned."""
        subscriber = self._subscribers.get(self.check(partition))
        if subscriber is None:
            raise UsageError(f"partition {partition}: not assigned: assign it first")
        return subscriber

    def all(self) -> list[Subscriber]:
        """Return the subscribers of all assigned partitions."""
        return list(self._subscribers.values())

    def take(self, partition: int, take: Callable[[Subscriber], T]) -> T:
        """Take from an assigned partition. Raises the error that ended its subscriber."""
        try:
            return take(self._subscribers[partition])
        except LogMismatch as mismatch:
            raise UsageError(
                f"partition {partition}: its log is {mismatch.log_id.hex()}, but its cursor is of another "
                "one: give the cursors of this stream, in the order of its partitions"
            ) from None

    def note_processed(self, partition: int | None) -> None:
        """Note that all that was returned of a partition is processed; nothing if it is not assigned."""
        subscriber = None if partition is None else self._subscribers.get(partition)
        if subscriber is not None:
            subscriber.mark_processed()

    def cursor(self, partition: int) -> Cursor | None:
        """Return the cursor of a partition: where it is read, or where it continues."""
        subscriber, start = self._subscribers.get(partition), self._starts[partition]
        if subscriber is not None:
            return subscriber.cursor
        return start if isinstance(start, Cursor) else None

    async def find_offsets(self, start: Start) -> list[int]:
        """Ask for an offset in each partition, over its connection; without one yet, over another one's.

        Raises Refused, UsageError.
        """
        offsets, failures = [0] * self.count, list[Exception]()
        others = [each for each in self.all() if each.started] or [self._subscribers[self.turns[0]]]

        async def find(partition: int) -> None:
            subscriber = self._subscribers.get(partition)
            if subscriber is None or not subscriber.started:
                subscriber = others[partition % len(others)]
            try:
                offsets[partition] = await subscriber.find_offset(start, partition)
            except (Refused, UsageError) as failure:  # a task group would wrap it
                failures.append(failure)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for partition in range(self.count):
                tasks.start_soon(find, partition)
        if failures:
            raise failures[0]
        return offsets

    def close(self) -> None:
        """Let all tasks end, after a last acknowledgement."""
        for is_ended in self._ends.values():
            is_ended.set()

    def _open(self, partition: int) -> None:
        start = self._starts[partition]
        log_id = start.log_id if isinstance(start, Cursor) else None
        subscriber = self._new_subscriber(partition=partition, start=start, log_id=log_id)
        subscriber.begin(self.changes.notify)
        self._subscribers[partition] = subscriber
        is_ended = self._ends[partition] = anyio.Event()
        self._tasks.start_soon(subscriber.run, is_ended)
