"""Expected contents of a sink at any offset of a history; its differences from a log on disk."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from delta_prop.auditing.audit import compare
from delta_prop.auditing.audit_scope import open_audited_log
from delta_prop.auditing.contents import rows_of_states
from delta_prop.auditing.sink_file import Scratch
from delta_prop_wire.algebra import VectorState
from tests.broker.histories import Name
from tests.broker.histories import Rows as HistoryRows
from tests.open_files import open_below

if TYPE_CHECKING:
    from delta_prop.auditing import Difference

MIB = 1024 * 1024
SinkContents = dict[Name, tuple[VectorState, int]]
"""The rows of a sink: each vector's state and the offset of its last delta."""


def differences_of(
    folder: str,
    contents: SinkContents,
    next_offset: int,
    *,
    quarantined: frozenset[str] = frozenset(),
    memory_bytes_max: int = MIB,
) -> list[Difference]:
    """Return the differences between a log and a sink's rows; the rows may be ahead of the sink's cursor."""
    states = [(*name, state) for name, (state, _) in contents.items()]
    rows = [(*row[:-1], contents[row[0], row[1]][1]) for row in rows_of_states(states)]
    with Scratch() as scratch:
        with scratch.open_sorted(rows, "rows") as sink_rows, open_audited_log(folder) as log:
            differences = list(
                compare(
                    sink_rows, log.fold_input(next_offset, sink_rows), scratch, quarantined, memory_bytes_max
                )
            )
        assert not open_below(scratch.path)
        return differences


def history_states(rows: HistoryRows, ends: dict[Name, int]) -> SinkContents:
    """Fold each vector's rows below its end offset."""
    contents = {}
    for name, end in ends.items():
        rows_below_end = [row for row in rows.changes[name] if row[1] < end]
        if rows_below_end:
            _, offset, _, _ = max(rows_below_end, key=itemgetter(0))
            contents[name] = (HistoryRows({name: rows_below_end}, rows.ids).fold()[name], offset)
    return contents
