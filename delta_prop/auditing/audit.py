"""Audit on one machine: every difference between a sink and the log, in bounded memory.

The folded states of the log and the sink's rows are sorted by key (namespace, NUL, vector id) and merged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePath

from delta_prop.auditing.audit_scope import (
    check_sink_offset,
    open_audited_log,
    read_quarantined_keys,
    sink_offset_of,
)
from delta_prop.auditing.contents import Lines, rows_of_states
from delta_prop.auditing.differences import Difference, LogState, SinkRow, classify, make_difference
from delta_prop.auditing.folding import RUN_BYTES_MAX, FoldedRuns, FoldInput, fold_log
from delta_prop.auditing.sink_file import Scratch, SinkRows, StorageSinkFile, read_lines
from delta_prop.calls.argument_checks import check_path
from delta_prop.directory.readonly_log import PartitionName
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.errors import UsageError


def audit(
    data: str | PurePath,
    sink: str | PurePath | Lines | Iterable[tuple[str, str, VectorState]],
    *,
    next_offset: int | None = None,
    name: str | None = None,
    stream: str = DEFAULT_STREAM,
    partition: int | None = None,
    memory_bytes_max: int = RUN_BYTES_MAX,
) -> Iterator[Difference]:
    """Yield every difference between a sink and a log in a data directory, by key, each with its repair.

    `sink`: a storage sink's file, which may be in use; or another sink's rows, such as `index.rows()`, or a
    table in JSON lines. A sink is compared with the log up to its own progress: the file's cursor, or
    `next_offset`, the offset after the last delta that it has applied (None: all). `name`: the sink's name;
    vectors with deltas in its quarantine are reported as quarantined, and not repaired. `stream`,
    `partition`: which log it is; a stream with one partition needs no number. `memory_bytes_max`: approximate
    memory for sorting; more is spilled to a temporary folder.

    Raises UsageError if the file or the log is not usable; Refused, LogCorrupted, OSError.
    """
    data = check_path("data", data)
    if isinstance(sink, PurePath):
        sink = str(sink)
    if isinstance(sink, bytes | dict) or not isinstance(sink, str | Lines | Iterable) or sink == "":
        raise UsageError(
            f"sink {sink!r:.60}: give a storage sink's file, Lines(PATH), or another sink's rows, as "
            "index.rows() returns them"
        )
    if next_offset is not None:
        _check_number("next_offset", next_offset, 0)
    _check_number("memory_bytes_max", memory_bytes_max, 1)
    if not isinstance(name, str | None):
        raise UsageError(f"name {name!r:.60}: give the name under which the sink is attached, as text")
    where = PartitionName(stream, partition)
    return _audit(data, where, sink, next_offset, name=name, memory_bytes_max=memory_bytes_max)


def _check_number(field: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UsageError(f"{field} {value!r:.60}: give an integer from {minimum} on")


def _audit(
    data: str,
    where: PartitionName,
    sink: str | Lines | Iterable[tuple[str, str, VectorState]],
    next_offset: int | None,
    *,
    name: str | None,
    memory_bytes_max: int,
) -> Iterator[Difference]:
    with ExitStack() as exits:
        scratch = exits.enter_context(Scratch())
        rows: SinkRows
        if isinstance(sink, str):
            rows = stored = exits.enter_context(StorageSinkFile(sink))
            # The log is opened after the rows, so it includes their deltas.
            log = exits.enter_context(open_audited_log(data, where))
            next_offset = sink_offset_of(stored, data, log.log_id)
        else:
            rows = exits.enter_context(_open_sorted(sink, scratch))
            log = exits.enter_context(open_audited_log(data, where))
        fold_input = log.fold_input(next_offset, rows)
        quarantined = read_quarantined_keys(data, name, where)
        yield from compare(rows, fold_input, scratch, quarantined, memory_bytes_max)


@contextmanager
def _open_sorted(
    sink: Lines | Iterable[tuple[str, str, VectorState]], scratch: Scratch
) -> Iterator[SinkRows]:
    if isinstance(sink, Lines):
        with scratch.open_sorted(sink.rows(read_lines(sink.path)), sink.path) as rows:
            rows.has_metadata = sink.has_metadata
            yield rows
    else:
        with scratch.open_sorted(rows_of_states(sink), "the sink's rows") as rows:
            yield rows


def compare(
    rows: SinkRows,
    fold_input: FoldInput,
    scratch: Scratch,
    quarantined: Container[str],
    memory_bytes_max: int,
) -> Iterator[Difference]:
    """Yield every difference between a sink's rows and the folded log. Raises as `audit` does."""
    check_sink_offset(fold_input.sink_offset, fold_input.start, fold_input.end)
    with fold_log(fold_input, scratch.disk, run_bytes_max=memory_bytes_max) as folded:
        yield from _find_differences(
            rows, folded, quarantined, log_continues=fold_input.sink_offset < fold_input.end
        )


def _find_differences(
    rows: SinkRows, folded: FoldedRuns, quarantined: Container[str], *, log_continues: bool
) -> Iterator[Difference]:
    """Yield the differences. `log_continues`: True if the log has rows after the sink's progress."""
    end_states = _SortedLookup(folded.at_end()) if log_continues else None
    for key, log_state, sink_row in _join_sorted(folded.at_sink(), rows.read_sorted()):
        verdict = classify(log_state, sink_row)
        if verdict is None:
            continue
        end_state = log_state if end_states is None else end_states.find(key)
        namespace, _, vector_id = key.partition("\0")
        state = None if end_state is None else end_state.state
        yield make_difference(
            (namespace, vector_id), verdict, sink_row, state, is_quarantined=key in quarantined
        )


def _join_sorted(
    log: Iterator[tuple[str, LogState]], sink: Iterator[tuple[str, SinkRow]]
) -> Iterator[tuple[str, LogState | None, SinkRow | None]]:
    """Yield each key of two sorted sides, with its state in the log and its row in the sink, or None."""
    log_item, sink_item = next(log, None), next(sink, None)
    while log_item is not None or sink_item is not None:
        if sink_item is None or (log_item is not None and log_item[0] < sink_item[0]):
            assert log_item is not None
            yield log_item[0], log_item[1], None
            log_item = next(log, None)
        elif log_item is None or sink_item[0] < log_item[0]:
            yield sink_item[0], None, sink_item[1]
            sink_item = next(sink, None)
        else:
            yield log_item[0], log_item[1], sink_item[1]
            log_item, sink_item = next(log, None), next(sink, None)


class _SortedLookup:
    """Looks up keys in sorted states; each key must be above the one before."""

    def __init__(self, states: Iterator[tuple[str, LogState]]) -> None:
        self._states = states
        self._next = next(states, None)

    def find(self, key: str) -> LogState | None:
        while self._next is not None and self._next[0] < key:
            self._next = next(self._states, None)
        return self._next[1] if self._next is not None and self._next[0] == key else None
