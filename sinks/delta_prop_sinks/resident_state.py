"""State of resident vectors that the sharing sinks read: the progress of the fold, residency, the rebuild.

Each class is changed by `resident.py`, and read by the sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_sinks.sink import StopSink
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_sinks.sink import SinkContext


class FoldProgress:
    """Progress of the fold, and the log that the deltas are from.

    `lamport`: the highest Lamport number that was folded; `lamport_before_log`: that before this log was
    first opened. `next_offset`: below it, all deltas for these vectors are folded. `folded`, `duplicates`:
    numbers of deltas since the vectors were made. `watchers`: called whenever deltas have been folded, or a
    rebuild has ended.
    """

    def __init__(self) -> None:
        self.log_id: bytes | None = None
        self.lamport = 0
        self.lamport_before_log = 0
        self.next_offset = 0
        self.folded = self.duplicates = 0
        self.watchers: list[Callable[[], None]] = []
        self._topics: frozenset[str] = frozenset()

    def enter(self, context: SinkContext) -> bool:
        """Prepare for deltas of the context's log; return True if it is another log than before.

        Raises UsageError if sinks that share the vectors subscribe to different topics: one would skip deltas
        that the other has not applied.
        """
        if self.log_id == context.log_id:
            if self._topics != context.topics:
                raise UsageError(
                    f"topics {sorted(context.topics)} differ from {sorted(self._topics)} of a sink that uses "
                    "the vectors: give both the same topics, or each its own ResidentVectors"
                )
            return False
        self._topics = context.topics
        is_another = self.log_id is not None
        if is_another:
            self.next_offset = 0
        self.log_id = context.log_id
        self.lamport_before_log = self.lamport
        return is_another

    def note_lamport(self, lamport: int) -> None:
        """Note a Lamport number that is folded."""
        self.lamport = max(self.lamport, lamport)

    def restart(self, log_id: bytes, next_offset: int, lamport: int) -> None:
        """Note that the vectors are the fold of all deltas of this log below `next_offset`."""
        self.log_id, self.next_offset, self.lamport = log_id, next_offset, lamport
        self.lamport_before_log = 0

    def notify_watchers(self) -> None:
        """Call all watchers."""
        for notify in self.watchers:
            notify()


class Residency:
    """Residency of the vectors: all are in memory, or some only in a store.

    `complete`: True if all are in memory. `stored`: True if a storage sink shares the vectors: it is the
    store. `loaded`: True once the store has loaded its rows. `evicted`: number of rows evicted so far.
    """

    def __init__(self) -> None:
        self.complete = True
        self.stored = self.loaded = False
        self.evicted = 0
        self._pins = 0

    @property
    def is_pinned(self) -> bool:
        """True if no row may be evicted."""
        return self._pins > 0 or not self.stored

    def pin(self, bytes_max: int) -> None:
        """Forbid eviction for a reader of all rows. Raises StopSink if some are evicted."""
        if not self.complete:
            raise _too_small(bytes_max)
        self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`."""
        self._pins -= 1

    def begin_partial(self, bytes_max: int) -> None:
        """Note that some rows are in the store only. Raises StopSink if no row may be evicted."""
        if self._pins:
            raise _too_small(bytes_max)
        self.complete = False

    def note_evicted(self, rows: int) -> None:
        """Count evicted rows."""
        self.evicted += rows
        self.complete = self.complete and not rows


class VectorRebuild:
    """The rebuild of the vectors from states, by one of the sinks that share them.

    `is_running`: True from its start to its end: no sink may fold meanwhile. `count`: the number of rebuilds
    that have ended.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.count = 0
        self._context: SinkContext | None = None  # of the sink that rebuilds

    def begin(self, context: SinkContext) -> bool:
        """Begin a rebuild by this sink; False if another sink rebuilds the vectors."""
        if self._context is not None and self._context is not context:
            return False
        self._context, self.is_running = context, True
        return True

    def is_by(self, context: SinkContext) -> bool:
        """True if this sink rebuilds the vectors."""
        return self._context is context

    def abandon(self) -> None:
        """Let another sink rebuild the vectors, since this one closes."""
        self._context = None

    def end(self) -> None:
        """End the rebuild."""
        self._context, self.is_running = None, False
        self.count += 1


def _too_small(bytes_max: int) -> StopSink:
    return StopSink(
        f"resident_bytes_max {bytes_max} is too small for all vectors, which an index needs in memory: "
        "raise it"
    )
