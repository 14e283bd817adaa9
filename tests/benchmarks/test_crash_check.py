"""The check behind the crash benchmarks: it passes what is right, and finds each kind of wrong by name."""

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
from delta_prop_broker.log.retention.compaction import run_to_end
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_batch
from tests.broker.durable import Clock

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("p0", "p1")
LINES = 3 * KEYS


def right() -> tuple[Log, History]:
    """Two producers, line by line in turn, all acknowledged but the last of each."""
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
    at = "null" if offset is None else offset
    told = f'{{"producer": "{name}", "line": {line}, "offset": {at}, "duplicate": {str(duplicate).lower()}}}'
    history.note([told + "\n", '{"producer": "p0", "li'], verdict)
    return verdict


def kinds(verdict: Verdict) -> set[str]:
    return set(verdict.counts)


def test_what_is_right_passes() -> None:
    log, history = right()
    assert check_log(log, history, NAMES).total == 0
    assert acknowledge(history, "p0", 1, 0, duplicate=True).total == 0
    assert (history.acks, history.duplicates) == (2 * LINES - 1, 1)


def move(log: Log, places: list[int]) -> None:
    """Rows in another order, numbered anew."""
    log.rows = [replace(log.rows[place], offset=offset) for offset, place in enumerate(places)]


def test_a_lost_tail_is_found() -> None:
    log, history = right()
    del log.rows[-4:]
    verdict = check_log(log, history, NAMES)
    assert verdict.counts == {"lost": 2}


def test_a_row_missing_in_the_middle_is_found() -> None:
    log, history = right()
    move(log, [place for place in range(2 * LINES) if place != 40])
    assert kinds(check_log(log, history, NAMES)) == {"lost", "hole", "moved"}


def test_a_delta_twice_is_found() -> None:
    log, history = right()
    log.rows.append(replace(log.rows[6], offset=len(log.rows)))
    assert check_log(log, history, NAMES).counts == {"duplicate": 1}


def test_lines_out_of_order_are_found() -> None:
    log, history = right()
    places = list(range(2 * LINES))
    places[-1], places[-3] = places[-3], places[-1]
    move(log, places)
    history.acked = {}
    assert kinds(check_log(log, history, NAMES)) == {"order", "hole"}


def test_offsets_that_leave_one_out_are_found() -> None:
    log, history = right()
    log.rows[-1] = replace(log.rows[-1], offset=len(log.rows))
    assert check_log(log, history, NAMES).counts == {"order": 1}


@pytest.mark.parametrize("line", [2, LINES])
def test_another_delta_than_was_sent_is_found(line: int) -> None:
    log, history = right()
    log.rows[2 * line - 2] = replace(log.rows[2 * line - 2], delta=make_delta("p0", line + KEYS))
    assert check_log(log, history, NAMES).counts == {"corrupt": 1}


def test_a_delta_that_nobody_sent_is_found() -> None:
    log, history = right()
    log.rows.append(Row(len(log.rows), origin_of("stranger"), 1, make_delta("p0", 1)))
    assert check_log(log, history, NAMES).counts == {"corrupt": 1}


@pytest.mark.parametrize(
    ("line", "offset", "duplicate"), [(5, 99, True), (5, None, True), (5, 8, False)], ids=str
)
def test_a_second_answer_that_differs_is_found(line: int, offset: int | None, duplicate: bool) -> None:
    _, history = right()
    assert acknowledge(history, "p0", line, offset, duplicate).counts == {"given twice": 1}


def test_a_refusal_is_found() -> None:
    verdict = Verdict()
    History().note(['{"line": 2, "error": "QUEUE_FULL", "message": "full"}\n'], verdict)
    assert verdict.counts == {"refused": 1}


def test_a_service_that_knows_less_than_its_log_is_found() -> None:
    log, _ = right()
    ready = {"watermarks": {"p0": LINES, "p1": LINES}, "next_offset": 2 * LINES}
    assert check_service(ready, log, NAMES).total == 0
    assert check_service({**ready, "watermarks": {"p0": 3, "p1": LINES}}, log, NAMES).counts == {
        "forgotten": 1
    }
    assert check_service({**ready, "next_offset": 7}, log, NAMES).counts == {"order": 1}


# --- files


def write(folder: Path, rounds: int = 4) -> None:
    """A log on this disk, as a service would have left it."""
    settings = LogSettings(segment_bytes_max=4096)
    log, _ = DurableLog.open(LocalDisk(folder), settings=settings, draw=bytes, clock=Clock())
    lines = LINES // rounds
    for at in range(rounds):
        for name in NAMES:
            base = at * lines + 1
            deltas = [make_delta(name, line) for line in range(base, base + lines)]
            batch = encode_batch(deltas, origin=origin_of(name), base=base)
            log.append(batch, lamport=log.next_offset + 1, source=Source.LOCAL)
    log.close()


def test_files_are_read_as_they_are_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    log = read_log(tmp_path)
    assert log.ends(NAMES) == dict.fromkeys(NAMES, LINES)
    assert log.segments > 1
    assert check_log(log, History(), NAMES).total == 0
    path = max(tmp_path.glob("streams/default/0/*.log"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    assert "corrupt" in kinds(check_log(read_log(tmp_path), History(), NAMES))


def test_a_file_that_was_cut_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    log, history = read_log(tmp_path), History()
    for row in log.rows:
        acknowledge(history, {origin_of(name): name for name in NAMES}[row.origin], row.line, row.offset)
    path = max(tmp_path.glob("streams/default/0/*.log"))
    os.truncate(path, 0)
    assert {"lost", "corrupt"} <= kinds(check_log(read_log(tmp_path), history, NAMES))


def compacted(folder: Path) -> tuple[Log, History]:
    """The log of `write`, its older part in a snapshot; every line was acknowledged."""
    write(folder)
    history = History()
    for row in read_log(folder).rows:
        acknowledge(history, {origin_of(name): name for name in NAMES}[row.origin], row.line, row.offset)
    settings = LogSettings(segment_bytes_max=4096, retention_bytes=4096)
    log, _ = DurableLog.open(LocalDisk(folder), settings=settings, draw=bytes, clock=Clock())
    compaction = log.take_compaction()
    assert compaction is not None
    log.finish_compaction(compaction, made=run_to_end(compaction))
    assert log.retain()
    log.close()
    return read_log(folder), history


def test_what_is_in_a_snapshot_counts_as_there(tmp_path: Path) -> None:
    log, history = compacted(tmp_path)
    assert log.snapshot is not None
    assert log.rows[0].offset == log.snapshot.offset > 0
    assert check_log(log, history, NAMES).total == 0
    assert log.ends(NAMES) == dict.fromkeys(NAMES, LINES)


def test_a_snapshot_that_is_missing_or_wrong_is_found(tmp_path: Path) -> None:
    log, history = compacted(tmp_path)
    kept = log.snapshot
    assert kept is not None
    log.snapshot = None
    assert "lost" in kinds(check_log(log, history, NAMES))
    log.snapshot = replace(kept, vectors=kept.vectors | {"p0/3": np.zeros(16, np.float32)})
    assert kinds(check_log(log, history, NAMES)) == {"corrupt"}
    log.snapshot = replace(kept, lines=kept.lines | {origin_of("p1"): 1})
    assert {"lost", "hole"} <= kinds(check_log(log, history, NAMES))


# --- the table


def table_of(log: Log, cursor: int, ahead: int = 0) -> Table:
    """The table as of a cursor; `ahead`: so many rows more are in it already."""
    vectors = {}
    for key in {row.delta.vector_id for row in log.rows}:
        steps = [row for row in log.rows if row.delta.vector_id == key and row.offset < cursor + ahead]
        if steps:
            vectors[key] = steps[-1].offset, fold(steps, steps[-1].offset)
    return Table(cursor, vectors)


@pytest.mark.parametrize(("cursor", "ahead"), [(0, 0), (30, 0), (30, 7), (2 * LINES, 0)])
def test_a_table_that_is_the_fold_passes(cursor: int, ahead: int) -> None:
    log, _ = right()
    verdict = check_table(table_of(log, cursor, ahead), log, finished=cursor == 2 * LINES)
    assert verdict.examples == []


def test_a_delta_applied_twice_or_not_at_all_is_found() -> None:
    log, _ = right()
    first, second, third = (row for row in log.rows if row.delta.vector_id == "p0/3")
    for steps in ([first, second, second, third], [first, third]):
        wrong = fold(steps, third.offset)
        table = table_of(log, 2 * LINES)
        vectors = dict(table.vectors)
        offset, value = vectors["p0/3"]
        assert not np.array_equal(value, wrong)
        vectors["p0/3"] = offset, wrong
        assert check_table(Table(table.cursor, vectors), log).counts == {"table": 1}


def test_a_cursor_and_data_that_disagree_are_found() -> None:
    log, _ = right()
    behind = table_of(log, 30)
    assert check_table(Table(60, behind.vectors), log).counts["table"] > 0
    assert check_table(Table(2 * LINES + 1, table_of(log, 2 * LINES).vectors), log).counts == {"table": 1}
    assert check_table(behind, log, finished=True).counts == {"table": 1}
    stranger = {**behind.vectors, "other": (0, np.zeros(DIMENSION, np.float32))}
    assert check_table(Table(30, stranger), log).counts == {"table": 1}


# --- real processes


def story_of(directory: Path, terms: DirectoryOptions) -> CrashRun:
    return CrashRun(directory, terms, Totals(), random.Random(1), life_s=(0.2, 0.2), start_share=0.0)


@pytest.mark.alone
def test_one_kill_is_survived(tmp_path: Path) -> None:
    story = story_of(tmp_path / "data", DirectoryOptions(storage=True, producers=NAMES))
    while not story.totals.acks and story.totals.rounds < 10:  # it may be killed before it answers
        assert story.round()
    story.end()
    assert story.totals.acks > 0
    assert story.totals.verdict.examples == []


def test_an_acknowledgement_before_its_time_is_caught(tmp_path: Path) -> None:
    story = story_of(tmp_path / "data", DirectoryOptions(level="memory", producers=NAMES))
    assert story.round()
    assert kinds(story.judge(read_log(story.directory / "log"))) == {"lost"}


def test_where_nothing_can_be_mounted_it_is_said_and_is_not_a_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert powercut.main(["--rounds", "1"]) == 77
    told = capsys.readouterr()
    assert told.out == ""
    assert all(f"NOT RUN on {kind}: " in told.err for kind in powercut.KINDS)


def test_a_report_of_nothing_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    totals = Totals(rounds=3, acks=3000, restarts_s=[0.5], opens_s=[0.1])
    assert crash.report("kills", {"log": totals}, None) == 0
    assert crash.report("kills", {"log": replace(totals, acks=2)}, None) == 1
    totals.verdict.add("lost", "p0 line 1")
    assert crash.report("kills", {"log": totals}, None) == 1
    assert "lost: p0 line 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("counts", "status"), [({}, 1), ({"lost": 3}, 0), ({"lost": 3, "corrupt": 1}, 1)], ids=str
)
def test_cuts_that_lose_nothing_prove_nothing(counts: dict[str, int], status: int) -> None:
    totals = Totals(rounds=3, acks=10)
    for kind, count in counts.items():
        for _ in range(count):
            totals.verdict.add(kind, "told")
    assert powercut._report_logged("ext4", totals) == status


def test_a_report_can_be_written_for_programs(tmp_path: Path) -> None:
    totals = Totals(rounds=1, acks=5, opens_s=[0.1], restarts_s=[0.2])
    totals.under_way["compaction"] += 2
    totals.verdict.add("lost", "one")
    assert crash.report("a run", {"service": totals}, str(tmp_path / "figures.json")) == 1
    told = json.loads((tmp_path / "figures.json").read_text())["service"]
    assert (told["under_way"], told["verdict"]["counts"]) == ({"compaction": 2}, {"lost": 1})
