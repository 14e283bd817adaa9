"""`audit`: compares a sink's contents with the log and repairs the differences, on this machine alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from delta_prop.auditing.audit import audit
from delta_prop.auditing.audit_scope import read_known_sinks, read_quarantined_keys
from delta_prop.auditing.contents import Lines
from delta_prop.auditing.repairing import (
    RepairResult,
    log_id_of,
    log_mismatch_error,
    repair,
    repair_delta_of,
    repair_directory,
)
from delta_prop.auditing.sink_file import Scratch, StorageSinkFile
from delta_prop.client import SyncProducer
from delta_prop.client.service_identity import LogMismatch
from delta_prop.commands.spark_checks import check_directory, check_output, check_tables, remote_of
from delta_prop.commands.spark_output import ROWS_MAX, put_rows
from delta_prop.commands.tables import name_of
from delta_prop.commands.wait_reporter import WaitReporter
from delta_prop.platform import system
from delta_prop.spark.arguments import FORMATS
from delta_prop.spark.options import Remote
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
REPORT_COLUMNS = ("difference", "namespace", "vector_id", "reason")
"""Fields of a difference that the printed table shows."""
_JSON_SUFFIXES = tuple(suffix for suffix, kind in FORMATS.items() if kind == "json")


def run_audit(options: Namespace) -> int:
    """Compare, report, and repair if `options` say so; return exit status 1 if differences remain.

    Raises UsageError, Refused, LogCorrupted, OSError.
    """
    target = find_repair_target(options)
    _check_only_json_lines(options)
    check_output(options)
    check_directory(options.data, writes=options.repair and target is None)
    name = find_sink_name(options)
    if options.contents is not None:
        check_tables([options.contents], options, "JSON lines")
    else:
        with StorageSinkFile(options.storage):
            pass  # opening the file raises if it is not a valid sink file
    sink = options.storage if options.contents is None else Lines(options.contents)
    differences = audit(
        options.data,
        sink,
        next_offset=options.next_offset,
        name=name,
        stream=options.stream,
        partition=options.partition,
    )
    counts: Counter[str] = Counter()
    progress = system.Progress()
    progress.report("the sink is compared with the log")
    with Scratch() as scratch, scratch.open_spool() as spool:
        try:
            for difference in differences:
                line = json.dumps(difference.line(), ensure_ascii=False, allow_nan=False)
                spool.write(line.encode() + b"\n")
                counts[difference.difference] += 1
        finally:
            progress.end()
        _write_report(spool, counts, options)
        note_differences(counts)
        if not counts or not options.repair:
            return FAILED if counts else OK
        result = apply_repair(_read_repair_deltas(spool), options, target)
    return note_repair(result, counts)


def _check_only_json_lines(options: Namespace) -> None:
    if options.contents is not None and not options.contents.rstrip("/").lower().endswith(_JSON_SUFFIXES):
        raise UsageError(
            f"--contents {options.contents!r:.300}: only JSON lines are read without --spark: name a file or "
            f"a folder that ends in {' or '.join(_JSON_SUFFIXES)}"
        )
    if options.output is not None and options.output.endswith(".parquet"):
        raise UsageError(f"--output {options.output!r:.300}: only JSON lines are written without --spark")


def _write_report(spool: BinaryIO, counts: Counter[str], options: Namespace) -> None:
    spool.seek(0)
    if options.output is not None or options.json:
        with system.open_atomic_output(options.output) as out:
            for line in spool:
                out.write(line)
            out.flush()
    elif counts:
        differences = [json.loads(line) for line, _ in zip(spool, range(ROWS_MAX), strict=False)]
        rows = [[difference[name] for name in REPORT_COLUMNS] for difference in differences]
        put_rows(REPORT_COLUMNS, rows, has_more=counts.total() > ROWS_MAX)


def _read_repair_deltas(spool: BinaryIO) -> Iterator[Delta]:
    spool.seek(0)
    for line in spool:
        delta = repair_delta_of(json.loads(line))
        if delta is not None:
            yield delta


# --- shared with the audit on Spark


def find_repair_target(options: Namespace) -> Remote | None:
    """Return the service that a repair is sent to; None if it goes to the directory. Raises UsageError."""
    if options.server is not None and not options.repair:
        raise UsageError("--to: only a repair sends something; add --repair")
    if options.next_offset is not None and (options.contents is None or options.next_offset < 0):
        raise UsageError(
            f"--next-offset {options.next_offset}: give an offset of at least 0, together with --contents"
        )
    return None if options.server is None else remote_of(options, "--to")


def find_sink_name(options: Namespace) -> str | None:
    """Return the audited sink's name; None if unknown. Raises UsageError if no sink has the given name."""
    if options.sink is not None:
        read_quarantined_keys(options.data, options.sink, name_of(options))
        return str(options.sink)
    if options.storage is None:
        return None
    return "storage" if "storage" in read_known_sinks(options.data, name_of(options)) else None


def apply_repair(deltas: Iterable[Delta], options: Namespace, target: Remote | None) -> RepairResult:
    """Send the deltas of a repair, or append them to the directory.

    Raises Refused, Unreachable, LogBusy.
    """
    if target is None:
        import anyio

        place = {"stream": options.stream, "partition": options.partition}
        return anyio.run(partial(repair_directory, deltas, options.data, **place))
    with _open_producer(target, options) as producer:
        return repair(deltas, producer)


def note_differences(counts: Counter[str]) -> None:
    """Report the number of differences by kind."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    system.note(f"{counts.total():,} differences: {kinds}" if counts else "no differences")


def note_repair(result: RepairResult, counts: Counter[str]) -> int:
    """Report the outcome of a repair; return the exit status."""
    system.note(
        f"{result.repaired:,} of {counts.total():,} were republished; {result.changed:,} have changed "
        f"since, {result.refused:,} were refused"
    )
    for line in result.reasons:
        system.note(line)
    return OK if result.repaired == counts.total() else FAILED


@contextmanager
def _open_producer(target: Remote, options: Namespace) -> Iterator[SyncProducer]:
    """Open a producer, but only to the audited log's service. Raises UsageError, Refused, Unreachable."""
    options.producer = options.producer or system.draw_producer_name()
    expected = log_id_of(options.data, name_of(options))
    producer = SyncProducer(
        target.addresses,
        name=options.producer,
        stream=options.stream,
        partition=options.partition,
        token=target.token,
        tls=target.tls,
        log_id=expected,
    )
    try:
        with _wait_reporter_of(producer).report_in_thread(), producer:
            yield producer
    except LogMismatch as mismatch:
        names = ", ".join(target.addresses)
        raise log_mismatch_error(names, mismatch.log_id, options.data, expected) from None


def _wait_reporter_of(producer: SyncProducer) -> WaitReporter:
    wait_reporter, processed = WaitReporter(), 0

    def is_waiting() -> bool:
        nonlocal processed
        counts, before = producer.statistics(), processed
        processed = counts.acknowledged + counts.refused
        if processed != before:
            wait_reporter.note_progress()
        return producer.log_id is None or producer.in_flight_offers > 0

    wait_reporter.get_cause, wait_reporter.is_waiting = lambda: producer.waits_for, is_waiting
    return wait_reporter
