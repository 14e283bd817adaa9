"""`audit`: where a sink's contents are not what the log says, and the repair; on this machine alone."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from delta_prop.auditing.audit import audit
from delta_prop.auditing.contents import Lines
from delta_prop.auditing.reach import known_sinks, set_aside
from delta_prop.auditing.repairing import (
    Repaired,
    log_id_of,
    mending_delta,
    other_log,
    repair,
    repair_directory,
)
from delta_prop.auditing.stored import Scratch, StoredFile
from delta_prop.client import SyncProducer
from delta_prop.client.known_service import OtherLog
from delta_prop.commands import edge
from delta_prop.commands.waiting import Waiting
from delta_prop.spark.command.checking import (
    check_directory,
    check_output,
    check_tables,
    remote_of,
)
from delta_prop.spark.command.shown import ROWS_MAX, put_rows
from delta_prop.spark.jobs.formats import FORMATS
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from delta_prop.spark.options import Remote
    from delta_prop_wire.delta import Delta

OK, FAILED = 0, 1
SHOWN = ("difference", "namespace", "vector_id", "reason")
"""What of a difference is shown to people."""
_JSON = tuple(end for end, kind in FORMATS.items() if kind == "json")


def run_audit(options: Namespace) -> int:
    """Compare, tell, and repair where that is asked for; exit status 1 where differences stay.

    Raises UsageError, Refused, and what reading the log raises.
    """
    target = checked_target(options)
    _check_local(options)
    check_output(options)
    check_directory(options.data, writes=options.repair and target is None)
    name = sink_name(options)
    if options.contents is not None:
        check_tables([options.contents], options, "JSON lines")
    else:
        with StoredFile(options.storage):
            pass  # or it is told what is wrong with the file
    sink = options.storage if options.contents is None else Lines(options.contents)
    found = audit(options.data, sink, come=options.come, name=name)
    counts: Counter[str] = Counter()
    progress = edge.Progress()
    progress.tell("the sink is compared with the log")
    with Scratch() as scratch, scratch.spool() as spool:
        try:
            for one in found:
                spool.write(json.dumps(one.line(), ensure_ascii=False, allow_nan=False).encode() + b"\n")
                counts[one.difference] += 1
        finally:
            progress.end()
        _give(spool, counts, options)
        note_found(counts)
        if not counts or not options.repair:
            return FAILED if counts else OK
        repaired = mend(_deltas(spool), options, target)
    return note_repaired(repaired, counts)


def _check_local(options: Namespace) -> None:
    if options.contents is not None and not options.contents.rstrip("/").lower().endswith(_JSON):
        raise UsageError(
            f"--contents {options.contents!r:.300}: only JSON lines are read without --spark: name a file or "
            f"a folder that ends in {' or '.join(_JSON)}"
        )
    if options.output is not None and options.output.endswith(".parquet"):
        raise UsageError(f"--output {options.output!r:.300}: only JSON lines are written without --spark")


def _give(spool: BinaryIO, counts: Counter[str], options: Namespace) -> None:
    """Give the report to a file or to standard output."""
    spool.seek(0)
    if options.output is not None or options.json:
        with edge.whole_output(options.output) as out:
            for line in spool:
                out.write(line)
            out.flush()
    elif counts:
        first = [json.loads(line) for line, _ in zip(spool, range(ROWS_MAX), strict=False)]
        rows = [[one[name] for name in SHOWN] for one in first]
        put_rows(SHOWN, rows, more=counts.total() > ROWS_MAX)


def _deltas(spool: BinaryIO) -> Iterator[Delta]:
    spool.seek(0)
    for line in spool:
        delta = mending_delta(json.loads(line))
        if delta is not None:
            yield delta


# --- what an audit on Spark has in common


def checked_target(options: Namespace) -> Remote | None:
    """The service that a repair goes to, None where it is the directory. Raises UsageError."""
    if options.server is not None and not options.repair:
        raise UsageError("--to: only a repair sends something; add --repair")
    if options.come is not None and (options.contents is None or options.come < 0):
        raise UsageError(f"--come {options.come}: give it beside --contents, an offset from 0 on")
    return None if options.server is None else remote_of(options, "--to")


def sink_name(options: Namespace) -> str | None:
    """Return the name that the sink has here, if known. Raises UsageError where none is of that name."""
    if options.sink is not None:
        set_aside(options.data, options.sink)
        return str(options.sink)
    return "storage" if options.storage is not None and "storage" in known_sinks(options.data) else None


def mend(deltas: Iterable[Delta], options: Namespace, target: Remote | None) -> Repaired:
    """Send the deltas of a repair, or write them into the directory. Raises Refused, Unreachable, LogBusy."""
    if target is None:
        import anyio

        return anyio.run(partial(repair_directory, deltas, options.data))
    with _producer(target, options) as producer:
        return repair(deltas, producer)


def note_found(counts: Counter[str]) -> None:
    """Say how many differences there are, of which kinds."""
    told = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))
    edge.note(f"{counts.total():,} differences: {told}" if counts else "no differences")


def note_repaired(repaired: Repaired, counts: Counter[str]) -> int:
    """Say what became of a repair; the exit status."""
    edge.note(
        f"{repaired.mended:,} of {counts.total():,} were said again; {repaired.moved_on:,} have moved on "
        f"since, {repaired.refused:,} were refused"
    )
    for line in repaired.told:
        edge.note(line)
    return OK if repaired.mended == counts.total() else FAILED


@contextmanager
def _producer(target: Remote, options: Namespace) -> Iterator[SyncProducer]:
    """Open one to the service of the audited log alone. Raises UsageError, Refused, Unreachable."""
    options.producer = options.producer or edge.drawn_name()
    wanted = log_id_of(options.data)
    producer = SyncProducer(
        target.addresses, name=options.producer, token=target.token, tls=target.tls, log_id=wanted
    )
    try:
        with _waiting_of(producer).told_beside(), producer:
            yield producer
    except OtherLog as other:
        raise other_log(", ".join(target.addresses), other.log_id, options.data, wanted) from None


def _waiting_of(producer: SyncProducer) -> Waiting:
    waiting, dealt_with = Waiting(), 0

    def busy() -> bool:
        nonlocal dealt_with
        counts, before = producer.statistics(), dealt_with
        dealt_with = counts.acknowledged + counts.refused
        if dealt_with != before:
            waiting.moved()
        return producer.log_id is None or producer.open_offers > 0

    waiting.ask, waiting.busy = lambda: producer.waits_for, busy
    return waiting
