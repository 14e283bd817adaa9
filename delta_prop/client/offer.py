"""An offer: the deltas of one call, which share one fate, from the call to the outcome.

Pure values and small moves. An offer has no dots until a batch is cut that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgpack

from delta_prop.published import Published
from delta_prop_wire.cutting import deltas_of
from delta_prop_wire.delta import Delta, Dot, Source, create, dense
from delta_prop_wire.delta import Kind as _Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop.client.lane import OpenFrame
    from delta_prop_wire.block import Block
    from delta_prop_wire.delta import Priority
    from delta_prop_wire.errors import Refused

ROW_BYTES = 64
"""What a row takes beside its name and content, about."""


class Place:
    """Where the last row of an offer stands in its origin. Counter 0: no dot yet; `gone`: nor will be."""

    __slots__ = ("counter", "gone", "origin")

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.counter = 0
        self.gone = False

    @property
    def awaited(self) -> bool:
        """Whether what names it has to wait until it has its dot."""
        return self.counter == 0 and not self.gone


class Columns(NamedTuple):
    """Whole vectors, one a row of `matrix`."""

    ids: Sequence[str]
    matrix: NDArray[np.float32]
    namespace: str
    kind: _Kind

    def deltas(self) -> list[Delta]:
        """The same as deltas."""
        make = create if self.kind is _Kind.CREATE else dense
        rows = zip(self.ids, self.matrix, strict=True)
        return [Delta(vector_id, make(row), self.namespace) for vector_id, row in rows]


class Offer:
    """Deltas of one priority. `tell` is called once, with the outcome.

    `after`: what must come first, by place or by name; `behind`: what touched the same vectors in other
    lanes; `counter`: the dot's, where the caller numbers. `alone`: it shares a batch with no other.
    `waited_for`: its caller waits only as long as `publish` does. `simple`: its deltas are, by `is_simple`.
    """

    __slots__ = (
        "after",
        "alone",
        "at",
        "behind",
        "columns",
        "count",
        "counter",
        "deltas",
        "done",
        "frame",
        "given_up",
        "has_ids",
        "place",
        "priority",
        "refusal",
        "simple",
        "size",
        "source",
        "tell",
        "waited_for",
    )

    def __init__(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        tell: Callable[[Published | Refused], None],
        *,
        columns: Columns | Block | None = None,
        after: Sequence[Place | Dot | bytes] = (),
        counter: int | None = None,
        simple: bool = False,
    ) -> None:
        self.priority = priority
        self.deltas: Sequence[Delta] = deltas
        self.columns: Columns | Block | None = columns
        self.tell = tell
        self.after = after
        self.behind: Sequence[Place] = ()
        self.counter = counter
        if columns is None:
            self.count, self.size = len(deltas), _size(deltas)
        elif isinstance(columns, Columns):
            self.count = len(columns.ids)
            self.size = columns.matrix.nbytes + ROW_BYTES * self.count
        else:
            self.count, self.size = columns.count, columns.size
        self.has_ids = bool(deltas) and deltas[0].id is not None
        self.source = deltas[0].source if deltas else Source.LOCAL  # where no hello says it
        self.alone = columns is not None or any(one.expect is not None for one in deltas)
        self.at = 0.0  # when the call was made
        self.place = Place(0)
        self.frame: OpenFrame | None = None
        self.refusal: Refused | None = None  # the last one, which may have passed
        self.given_up = False
        self.waited_for = False
        self.simple = simple
        self.done = False

    @property
    def calls(self) -> int:
        """How many calls it holds."""
        return 1

    @property
    def is_block(self) -> bool:
        """Whether it came as a block, of whose rows nobody has looked at one."""
        return not isinstance(self.columns, Columns | None)

    @property
    def rows(self) -> Sequence[Delta]:
        """Its deltas, as long as no batch holds them."""
        if self.columns is None:
            return self.deltas
        if isinstance(self.columns, Columns):
            return self.columns.deltas()
        return list(deltas_of(self.columns.encode(origin=0, base=1)))

    @property
    def ready(self) -> bool:
        """Whether everything that must come first has its dot."""
        for place in self.behind:
            if place.awaited:
                return False
        return not any(isinstance(one, Place) and one.awaited for one in self.after)

    def parents(self) -> list[Dot | bytes]:
        """What must come first, by name; of the same origin's, order sees to it."""
        named: list[Dot | bytes] = []
        for one in self.after:
            if not isinstance(one, Place):
                named.append(one)
            elif one.counter and one.origin != self.place.origin:
                named.append(Dot(one.origin, one.counter))
        return named

    def encoded(self, frame: OpenFrame) -> None:
        """A batch holds these deltas from now on: they need not lie here too."""
        self.frame = frame
        self.deltas, self.columns = (), None

    def settle(self, outcome: Published | Refused) -> None:
        """Tell the outcome."""
        assert not self.done, "told twice"
        self.done = True
        self.deltas, self.columns, self.frame = (), None, None
        self.tell(outcome)


class Joined:
    """The first and the last rows of an offer, by themselves: the outcomes of both are told as one."""

    def __init__(self, whole: Offer) -> None:
        self._whole = whole
        self._outcomes: list[Published | Refused | None] = [None, None]

    def tell(self, part: int) -> Callable[[Published | Refused], None]:
        """What one part's offer calls."""

        def told(outcome: Published | Refused) -> None:
            self._outcomes[part] = outcome
            first, second = self._outcomes
            if first is not None and second is not None:
                self._whole.settle(self._together(first, second))

        return told

    def _together(self, first: Published | Refused, second: Published | Refused) -> Published | Refused:
        if not isinstance(first, Published):
            return first
        if not isinstance(second, Published):
            return second
        rows = [*first.places(), *second.places()]
        if any(not one.duplicate for one in rows):
            return Published.of_rows(rows, second.level)
        duplicates = {row: one.offset for row, one in enumerate(rows)}
        return Published(first.offset, first.dot, len(rows), second.level, duplicates)


def _size(deltas: Sequence[Delta]) -> int:
    """About how many bytes of a batch these take, rather more than fewer."""
    size = 0
    for delta in deltas:
        operation = delta.operation
        size += ROW_BYTES + 3 * len(delta.vector_id) + len(operation.data)
        if operation.values is not None:
            size += operation.values.nbytes
        if operation.indices is not None:
            size += operation.indices.nbytes
        if delta.metadata is not None:
            size += len(msgpack.packb(dict(delta.metadata)))
        if delta.parents or delta.topics:
            size += 24 * len(delta.parents) + sum(8 + 3 * len(topic) for topic in delta.topics)
    return size
