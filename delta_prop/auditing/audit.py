"""Audit on one machine: every difference between a sink and the log, in bounded memory.

What the log makes of each vector and what the sink holds come sorted by key, and are compared side by side.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from delta_prop.auditing.contents import Lines, rows_of_states
from delta_prop.auditing.differences import Difference, difference, judge
from delta_prop.auditing.folding import RUN_BYTES_MAX, fold_log
from delta_prop.auditing.reach import audited_log, check_come, reached_by, set_aside
from delta_prop.auditing.stored import Scratch, StoredFile, lines_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from delta_prop.auditing.differences import Held, Known
    from delta_prop.auditing.folding import Folded, Span
    from delta_prop.auditing.stored import Rows
    from delta_prop_wire.algebra import State


def audit(
    data: str,
    sink: str | Lines | Iterable[tuple[str, str, State]],
    *,
    come: int | None = None,
    name: str | None = None,
    memory_bytes_max: int = RUN_BYTES_MAX,
) -> Iterator[Difference]:
    """Every difference between a sink and the log in a data directory, by key, and what mends each.

    `sink`: a storage sink's file, which may be in use; or what another one holds, such as `index.rows()`,
    or a table in JSON lines.
    A sink is held to what it has come to: the file's cursor, or `come`, the offset behind the last delta that
    it has applied (None: all). `name`: what the sink is attached as: vectors of which its quarantine holds
    deltas are told as set aside, and not repaired. `memory_bytes_max`: about the memory for sorting; what is
    more goes to a temporary folder.

    Raises UsageError where the file, or the log, cannot tell; Refused, LogDamaged, OSError.
    """
    with ExitStack() as exits:
        scratch = exits.enter_context(Scratch())
        rows: Rows
        if isinstance(sink, str):
            rows = stored = exits.enter_context(StoredFile(sink))
            log = exits.enter_context(audited_log(data))  # behind the rows: it has what made them
            come = reached_by(stored, data, log.log_id)
        else:
            rows = exits.enter_context(_sorted(sink, scratch))
            log = exits.enter_context(audited_log(data))
        span = log.span(come, rows)
        yield from compare(rows, span, scratch, set_aside(data, name), memory_bytes_max)


@contextmanager
def _sorted(sink: Lines | Iterable[tuple[str, str, State]], scratch: Scratch) -> Iterator[Rows]:
    if isinstance(sink, Lines):
        with scratch.sorted_rows(sink.rows(lines_of(sink.path)), sink.path) as rows:
            rows.tell_metadata = sink.tell_metadata
            yield rows
    else:
        with scratch.sorted_rows(rows_of_states(sink), "what the sink holds") as rows:
            yield rows


def compare(
    rows: Rows, span: Span, scratch: Scratch, aside: Container[str], memory_bytes_max: int
) -> Iterator[Difference]:
    """Every difference between a sink's rows and what is made of a log. Raises as `audit` does."""
    check_come(span.come, span.begin, span.end)
    with fold_log(span, scratch.disk, run_bytes_max=memory_bytes_max) as folded:
        yield from _differences(rows, folded, aside, moved=span.come < span.end)


def _differences(rows: Rows, folded: Folded, aside: Container[str], *, moved: bool) -> Iterator[Difference]:
    """`moved`: the log goes on behind what the sink has come to."""
    present = _Present(folded.at_end()) if moved else None
    for key, known, held in _side_by_side(folded.at_sink(), rows.held()):
        verdict = judge(known, held)
        if verdict is None:
            continue
        now = known if present is None else present.of(key)
        namespace, _, vector_id = key.partition("\0")
        state = None if now is None else now.state
        yield difference((namespace, vector_id), verdict, held, state, aside=key in aside)


def _side_by_side(
    log: Iterator[tuple[str, Known]], sink: Iterator[tuple[str, Held]]
) -> Iterator[tuple[str, Known | None, Held | None]]:
    """Each key that one of two sorted sides has."""
    known, held = next(log, None), next(sink, None)
    while known is not None or held is not None:
        if held is None or (known is not None and known[0] < held[0]):
            assert known is not None
            yield known[0], known[1], None
            known = next(log, None)
        elif known is None or held[0] < known[0]:
            yield held[0], None, held[1]
            held = next(sink, None)
        else:
            yield known[0], known[1], held[1]
            known, held = next(log, None), next(sink, None)


class _Present:
    """Sorted states, asked for by keys that rise."""

    def __init__(self, states: Iterator[tuple[str, Known]]) -> None:
        self._states = states
        self._next = next(states, None)

    def of(self, key: str) -> Known | None:
        while self._next is not None and self._next[0] < key:
            self._next = next(self._states, None)
        return self._next[1] if self._next is not None and self._next[0] == key else None
