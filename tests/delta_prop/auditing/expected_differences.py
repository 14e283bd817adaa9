"""Expected contents of a sink at any offset of a history, and its differences from a log on disk."""

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
Held = dict[Name, tuple[VectorState, int]]
"""The rows of a sink: each vector's state and the offset of its last delta."""


def differences_of(
    folder: str,
    held: Held,
    come: int,
    *,
    quarantined: frozenset[str] = frozenset(),
    memory_bytes_max: int = MIB,
) -> list[Difference]:
    """Return the differences between a log and a sink's rows, some of which may be ahead of its cursor."""
    states = [(*name, state) for name, (state, _) in held.items()]
    rows = [(*row[:-1], held[row[0], row[1]][1]) for row in rows_of_states(states)]
    with Scratch() as scratch:
        with scratch.open_sorted(rows, "rows") as sink_rows, open_audited_log(folder) as log:
            found = list(
                compare(sink_rows, log.fold_input(come, sink_rows), scratch, quarantined, memory_bytes_max)
            )
        assert not open_below(scratch.path)
        return found


def history_states(rows: HistoryRows, ends: dict[Name, int]) -> Held:
    """Fold each vector's rows below its end offset."""
    held = {}
    for name, end in ends.items():
        below = [row for row in rows.changes[name] if row[1] < end]
        if below:
            _, offset, _, _ = max(below, key=itemgetter(0))
            held[name] = (HistoryRows({name: below}, rows.ids).fold()[name], offset)
    return held
