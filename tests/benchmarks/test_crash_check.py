"""The check behind the crash benchmarks passes a correct log, and finds each kind of violation."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import crash, powercut
from benchmarks._crash_check import (
    History,
    Log,
    Row,
    Table,
    Verdict,
    check_log,
    check_service,
    check_table,
    fold,
    read_log,
)
from benchmarks._crash_rounds import CrashRun, DirectoryOptions, Totals
from benchmarks._crash_writer import DIMENSION, KEYS, make_delta, origin_of
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.retention.compaction import run_to_end
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_batch
from tests.broker.durable import Clock, FixedRandomness

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("p0", "p1")
LINES = 3 * KEYS


def correct_log() -> tuple[Log, History]:
    """Return the log of two producers, which alternate. Line n of a producer is its n-th delta; all but the
    last line of each are acknowledged.
    """
    log, history = Log(), History()
    for line in range(1, LINES + 1):
        for name in NAMES:
            offset = len(log.rows)
            log.rows.append(Row(offset, origin_of(name), line, make_delta(name, line)))
            if line < LINES:
                acknowledge(history, name, line, offset)
    return log, history


def acknowledge(
    history: History, name: str, line: int, offset: int | None, duplicate: bool = False
) -> Verdict:
    verdict = Verdict()
    record = json.dumps({"producer": name, "line": line, "offset": offset, "duplicate": duplicate})
    history.note([record + "\n", '{"producer": "p0", "li'], verdict)
    return verdict


def kinds(verdict: Verdict) -> set[str]:
    return set(verdict.counts)


def test_correct_log_passes() -> None:
    log, history = correct_log()
    assert check_log(log, history, NAMES).total == 0
    assert acknowledge(history, "p0", 1, 0, duplicate=True).total == 0
    assert (history.acks, history.duplicates) == (2 * LINES - 1, 1)


def reorder(log: Log, order: list[int]) -> None:
    """Give the log its rows in the order of these indexes, with offsets from 0 on."""
    log.rows = [replace(log.rows[index], offset=offset) for offset, index in enumerate(order)]


def test_lost_tail_is_found() -> None:
    log, history = correct_log()
    del log.rows[-4:]
    verdict = check_log(log, history, NAMES)
    assert verdict.counts == {"lost": 2}


def test_row_missing_in_the_middle_is_found() -> None:
    log, history = correct_log()
    reorder(log, [index for index in range(2 * LINES) if index != 40])
    assert kinds(check_log(log, history, NAMES)) == {"lost", "missing line", "other offset"}


def test_duplicate_delta_is_found() -> None:
    log, history = correct_log()
    log.rows.append(replace(log.rows[6], offset=len(log.rows)))
    assert check_log(log, history, NAMES).counts == {"stored twice": 1}


def test_lines_out_of_order_are_found() -> None:
    log, history = correct_log()
    order = list(range(2 * LINES))
    order[-1], order[-3] = order[-3], order[-1]
    reorder(log, order)
    history.acked = {}
    assert kinds(check_log(log, history, NAMES)) == {"out of order", "missing line"}


def test_skipped_offset_is_found() -> None:
    log, history = correct_log()
    log.rows[-1] = replace(log.rows[-1], offset=len(log.rows))
    assert check_log(log, history, NAMES).counts == {"out of order": 1}


@pytest.mark.parametrize("line", [2, LINES])
def test_altered_delta_is_found(line: int) -> None:
    log, history = correct_log()
    log.rows[2 * line - 2] = replace(log.rows[2 * line - 2], delta=make_delta("p0", line + KEYS))
    assert check_log(log, history, NAMES).counts == {"corrupt": 1}


def test_delta_of_unknown_producer_is_found() -> None:
    log, history = correct_log()
    log.rows.append(Row(len(log.rows), origin_of("stranger"), 1, make_delta("p0", 1)))
    assert check_log(log, history, NAMES).counts == {"corrupt": 1}


@pytest.mark.parametrize(
    ("line", "offset", "duplicate"), [(5, 99, True), (5, None, True), (5, 8, False)], ids=str
)
def test_differing_second_answer_is_found(line: int, offset: int | None, duplicate: bool) -> None:
    _, history = correct_log()
    assert acknowledge(history, "p0", line, offset, duplicate).counts == {"answers differ": 1}


def test_refusal_is_found() -> None:
    verdict = Verdict()
    History().note(['{"line": 2, "error": "QUEUE_FULL", "message": "full"}\n'], verdict)
    assert verdict.counts == {"refused": 1}


def test_watermark_or_next_offset_below_those_of_the_log_is_found() -> None:
    log, _ = correct_log()
    ready = {"watermarks": {"p0": LINES, "p1": LINES}, "next_offset": 2 * LINES}
    assert check_service(ready, log, NAMES).total == 0
    assert check_service({**ready, "watermarks": {"p0": 3, "p1": LINES}}, log, NAMES).counts == {
        "wrong watermark": 1
    }
    assert check_service({**ready, "next_offset": 7}, log, NAMES).counts == {"out of order": 1}


# --- files


def write_log(folder: Path, batches_per_producer: int = 4) -> None:
    """Write a log of `LINES` lines of each producer into the folder, as a service would leave it."""
    settings = LogSettings(segment_bytes_max=4096)
    log, _ = DurableLog.open(
        LocalDisk(folder), settings=settings, randomness=FixedRandomness(), clock=Clock()
    )
    lines = LINES // batches_per_producer
    for batch_number in range(batches_per_producer):
        for name in NAMES:
            base = batch_number * lines + 1
            deltas = [make_delta(name, line) for line in range(base, base + lines)]
            batch = encode_batch(deltas, origin=origin_of(name), base=base)
            log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)
    log.close()


def test_valid_files_pass_and_flipped_bit_is_found(tmp_path: Path) -> None:
    write_log(tmp_path)
    log = read_log(tmp_path)
    assert log.ends(NAMES) == dict.fromkeys(NAMES, LINES)
    assert log.segments > 1
    assert check_log(log, History(), NAMES).total == 0
    path = max(tmp_path.glob("streams/default/0/*.log"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    assert "corrupt" in kinds(check_log(read_log(tmp_path), History(), NAMES))


def test_truncated_file_is_found(tmp_path: Path) -> None:
    write_log(tmp_path)
    log, history = read_log(tmp_path), History()
    for row in log.rows:
        acknowledge(history, {origin_of(name): name for name in NAMES}[row.origin], row.line, row.offset)
    path = max(tmp_path.glob("streams/default/0/*.log"))
    os.truncate(path, 0)
    assert {"lost", "corrupt"} <= kinds(check_log(read_log(tmp_path), history, NAMES))


def compacted_log(folder: Path) -> tuple[Log, History]:
    """Return a compacted log with a snapshot, and a history in which every line was acknowledged."""
    write_log(folder)
    history = History()
    for row in read_log(folder).rows:
        acknowledge(history, {origin_of(name): name for name in NAMES}[row.origin], row.line, row.offset)
    settings = LogSettings(segment_bytes_max=4096, retention_bytes=4096)
    log, _ = DurableLog.open(
        LocalDisk(folder), settings=settings, randomness=FixedRandomness(), clock=Clock()
    )
    compaction = log.take_compaction()
    assert compaction is not None
    log.finish_compaction(compaction, made=run_to_end(compaction))
    assert log.retain()
    log.close()
    return read_log(folder), history


def test_rows_in_snapshot_count_as_stored(tmp_path: Path) -> None:
    log, history = compacted_log(tmp_path)
    assert log.snapshot is not None
    assert log.rows[0].offset == log.snapshot.offset > 0
    assert check_log(log, history, NAMES).total == 0
    assert log.ends(NAMES) == dict.fromkeys(NAMES, LINES)


def test_missing_or_wrong_snapshot_is_found(tmp_path: Path) -> None:
    log, history = compacted_log(tmp_path)
    snapshot = log.snapshot
    assert snapshot is not None
    log.snapshot = None
    assert "lost" in kinds(check_log(log, history, NAMES))
    log.snapshot = replace(snapshot, vectors=snapshot.vectors | {"p0/3": np.zeros(16, np.float32)})
    assert kinds(check_log(log, history, NAMES)) == {"corrupt"}
    log.snapshot = replace(snapshot, lines=snapshot.lines | {origin_of("p1"): 1})
    assert {"lost", "missing line"} <= kinds(check_log(log, history, NAMES))


# --- the table


def table_of(log: Log, cursor: int, ahead: int = 0) -> Table:
    """Return the table as of a cursor, with the next `ahead` rows applied already."""
    vectors = {}
    for key in {row.delta.vector_id for row in log.rows}:
        rows = [row for row in log.rows if row.delta.vector_id == key and row.offset < cursor + ahead]
        if rows:
            vectors[key] = rows[-1].offset, fold(rows, rows[-1].offset)
    return Table(cursor, vectors)


@pytest.mark.parametrize(("cursor", "ahead"), [(0, 0), (30, 0), (30, 7), (2 * LINES, 0)])
def test_table_equal_to_fold_passes(cursor: int, ahead: int) -> None:
    log, _ = correct_log()
    verdict = check_table(table_of(log, cursor, ahead), log, finished=cursor == 2 * LINES)
    assert verdict.examples == []


def test_delta_applied_twice_or_never_is_found() -> None:
    log, _ = correct_log()
    first, second, third = (row for row in log.rows if row.delta.vector_id == "p0/3")
    for applied_rows in ([first, second, second, third], [first, third]):
        wrong = fold(applied_rows, third.offset)
        table = table_of(log, 2 * LINES)
        vectors = dict(table.vectors)
        offset, value = vectors["p0/3"]
        assert not np.array_equal(value, wrong)
        vectors["p0/3"] = offset, wrong
        assert check_table(Table(table.cursor, vectors), log).counts == {"wrong table": 1}


def test_cursor_beyond_data_or_log_and_foreign_key_are_found() -> None:
    log, _ = correct_log()
    table = table_of(log, 30)
    assert check_table(Table(60, table.vectors), log).counts["wrong table"] > 0
    assert check_table(Table(2 * LINES + 1, table_of(log, 2 * LINES).vectors), log).counts == {
        "wrong table": 1
    }
    assert check_table(table, log, finished=True).counts == {"wrong table": 1}
    with_foreign_key = {**table.vectors, "other": (0, np.zeros(DIMENSION, np.float32))}
    assert check_table(Table(30, with_foreign_key), log).counts == {"wrong table": 1}


# --- real processes


def crash_run(directory: Path, options: DirectoryOptions) -> CrashRun:
    return CrashRun(directory, options, Totals(), random.Random(1), run_s=(0.2, 0.2), start_share=0.0)


@pytest.mark.alone
def test_one_kill_is_survived(tmp_path: Path) -> None:
    run = crash_run(tmp_path / "data", DirectoryOptions(storage=True, producers=NAMES))
    while not run.totals.acks and run.totals.rounds < 10:  # the service may be killed before it answers
        assert run.run_round()
    run.end()
    assert run.totals.acks > 0
    assert run.totals.verdict.examples == []


def test_premature_acknowledgement_is_found(tmp_path: Path) -> None:
    run = crash_run(tmp_path / "data", DirectoryOptions(level="memory", producers=NAMES))
    found: set[str] = set()
    for _ in range(8):  # a kill may come at a moment when everything is written
        assert run.run_round()
        found |= kinds(run.judge(read_log(run.directory / "log")))
        if found:
            break
    assert found == {"lost"}


def test_unmountable_images_are_reported_as_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert powercut.main(["--rounds", "1"]) == 77
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(f"NOT RUN on {kind}: " in printed.err for kind in powercut.FILE_SYSTEMS)


def test_incomplete_or_violated_report_fails(capsys: pytest.CaptureFixture[str]) -> None:
    totals = Totals(rounds=3, acks=3000, restarts_s=[0.5], opens_s=[0.1])
    assert crash.report("kills", {"log": totals}, None) == 0
    assert crash.report("kills", {"log": replace(totals, acks=2)}, None) == 1
    totals.verdict.add("lost", "p0 line 1")
    assert crash.report("kills", {"log": totals}, None) == 1
    assert "lost: p0 line 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("counts", "status"), [({}, 1), ({"lost": 3}, 0), ({"lost": 3, "corrupt": 1}, 1)], ids=str
)
def test_logged_power_cuts_pass_only_if_rows_are_lost_and_nothing_else_is_found(
    counts: dict[str, int], status: int
) -> None:
    totals = Totals(rounds=3, acks=10)
    for kind, count in counts.items():
        for _ in range(count):
            totals.verdict.add(kind, "an example")
    assert powercut._report_logged("ext4", totals) == status


def test_report_is_written_as_json(tmp_path: Path) -> None:
    totals = Totals(rounds=1, acks=5, opens_s=[0.1], restarts_s=[0.2])
    totals.interrupted["compaction"] += 2
    totals.verdict.add("lost", "one")
    assert crash.report("a run", {"service": totals}, str(tmp_path / "figures.json")) == 1
    figures = json.loads((tmp_path / "figures.json").read_text())["service"]
    assert (figures["interrupted"], figures["verdict"]["counts"]) == ({"compaction": 2}, {"lost": 1})
