"""Compare-and-set: checks the expectations of a batch's rows, each against the rows before it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from delta_prop_wire.delta import ABSENT, FULL_KINDS, Dot, Head, Kind
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch


def check_expects(batch: Batch, head_of: Callable[[str, str], Head | None], rows: int | None = None) -> None:
    """Raise Refused (CONFLICT) for the first row whose vector is not as the row expects.

    `head_of`: returns a vector's head before the batch; None if the vector has none. `rows`: the number of
    first rows to check; None for all.
    """
    expects = batch.expect_by_row
    namespaces, keys, kinds = batch.namespaces, batch.keys, batch.kinds
    expected_refs = {(namespaces[row], keys[row]) for row in expects}
    heads = dict[tuple[str, str], Head | None]()
    for row, ref in enumerate(islice(zip(namespaces, keys, strict=True), rows)):
        if ref not in expected_refs:
            continue
        head = heads[ref] if ref in heads else head_of(*ref)
        expected = expects.get(row)
        if expected is not None and not _is_met(head, expected):
            raise _conflict(row, ref[1], head, expected)
        heads[ref] = Head(batch.dot(row), is_alive_after(kinds[row], None if head is None else head.alive))


def _is_met(head: Head | None, expected: Dot) -> bool:
    if expected == ABSENT:
        return head is None or not head.alive
    return head is not None and head.dot == expected


def is_alive_after(kind: int, alive: bool | None) -> bool:
    """Return True if the vector counts as existing after a row of this kind.

    `alive`: the same before the row; None if no head of the vector is known. With None, a partial or unknown
    operation is taken to have met an existing vector.
    """
    return kind in FULL_KINDS or (kind != Kind.DELETE and alive is not False)


def _conflict(row: int, vector_id: str, head: Head | None, expected: Dot) -> Refused:
    present = None if head is None else head.dot
    what = "no vector" if expected == ABSENT else f"{expected}"
    return Refused(
        ErrorCode.CONFLICT,
        f"row {row}: {vector_id!r} was last changed by {present or 'nothing'}, but the row expects {what}: "
        "read the vector again and send a new delta",
        row=row,
        field="expect",
        details={"current": present},
    )
