"""`publish` without progress: within seconds it reports what it waits for, and later that it continues."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from delta_prop.commands import system, wait_reporter
from delta_prop.commands.wait_reporter import WaitReporter
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.commands.support import create_lines
from tests.page_samples import mask_numbers, printed_in, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.delta_prop.commands.support import Command

FULL = Refused(ErrorCode.LOG_FULL, "the disk is full", retry_after_ms=1000)


def test_publish_reports_the_wait_and_its_end(either: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    full, real, note = [False], LocalDisk.free_bytes, system.note

    def note_and_free_disk(line: str) -> None:
        full[0] = full[0] and "LOG_FULL" not in line  # the disk has space again once the wait is reported
        note(line)

    monkeypatch.setattr(LocalDisk, "free_bytes", lambda disk: 0 if full[0] else real(disk))
    monkeypatch.setattr(system, "note", note_and_free_disk)
    monkeypatch.setattr(wait_reporter, "REPORT_AFTER_S", 0.5)
    either.publish(create_lines(1))
    full[0] = True
    time.sleep(0.2)
    if either.addresses is not None:
        either.publish(create_lines(1))  # free space is checked at a commit, up to ten times per second
    done = either.publish(create_lines(20))
    assert (done.status, done.lines[-1]["acknowledged"]) == (0, 20)
    *_, waits, goes_on = done.err.splitlines()  # on a busy machine a wait for the connection is reported too
    assert waits.startswith("delta-prop: waiting, no answer for ")
    assert ": LOG_FULL: the disk has 0 bytes left, " in waits
    assert goes_on.startswith("delta-prop: goes on after ")
    page = printed_in(sample("delta-prop publish changes.jsonl --to localhost:7373"))
    assert [mask_numbers(line) for line in (waits, goes_on)] == [mask_numbers(line) for line in page[:2]]
    assert mask_numbers(done.out).startswith(mask_numbers(page[2].partition("…")[0]))


def report_lines(
    steps: list[tuple[float, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ask: Callable[[], Exception | None] = lambda: FULL,
) -> list[str]:
    """Run steps (`look`, `moved`, `rest`, `work`) at the given seconds; return the printed lines."""
    clock, busy = [0.0], [True]
    monkeypatch.setattr(wait_reporter.system, "now", lambda: clock[0])
    one = WaitReporter()
    one.get_cause, one.is_busy = ask, lambda: busy[0]
    for at, what in steps:
        clock[0] = at
        if what == "moved":
            one.note_progress()
        elif what == "look":
            one._poll(at)
        else:
            busy[0] = what == "work"
            one._poll(at)
    return capsys.readouterr().err.splitlines()


def test_wait_is_reported_once_and_then_periodically(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(1.0, "moved"), (3.5, "look"), (4.1, "look"), (10.0, "look"), (34.2, "look"), (40.0, "moved")]
    assert report_lines([*steps, (42.0, "look"), (42.5, "moved")], monkeypatch, capsys) == [
        "delta-prop: waiting, no answer for 3 s: LOG_FULL: the disk is full",
        "delta-prop: waiting, no answer for 33 s: LOG_FULL: the disk is full",
        "delta-prop: goes on after 39 s",
    ]


def test_new_cause_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = iter([None, ConnectionRefusedError(111, "Connection refused"), FULL, None])
    steps = [(4.0, "look"), (4.2, "look"), (4.4, "look"), (4.6, "look")]
    assert report_lines(steps, monkeypatch, capsys, lambda: next(causes)) == [
        "delta-prop: waiting, no answer for 4 s: no answer has come yet",
        "delta-prop: waiting, no answer for 4 s: no connection ([Errno 111] Connection refused), retrying",
        "delta-prop: waiting, no answer for 4 s: LOG_FULL: the disk is full",
    ]


def test_waiting_for_input_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(0.0, "rest"), (50.0, "look"), (51.0, "work"), (52.0, "look")]
    assert report_lines(steps, monkeypatch, capsys) == []
