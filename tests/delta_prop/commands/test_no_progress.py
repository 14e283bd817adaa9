"""`publish` without progress: within seconds it reports what it waits for, and later that it continues."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from delta_prop.commands import wait_reporter
from delta_prop.commands.wait_reporter import WaitReporter
from delta_prop.platform import system
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.commands.support import create_lines
from tests.page_samples import mask_numbers, printed_in, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.delta_prop.commands.support import Command

FULL = Refused(ErrorCode.LOG_FULL, "the disk is full", retry_after_ms=1000)


def test_publish_reports_the_wait_and_its_end(
    local_or_remote: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_disk_full, real, note = [False], LocalDisk.free_bytes, system.note

    def note_and_free_disk(line: str) -> None:
        # The disk has space again once the wait is reported.
        is_disk_full[0] = is_disk_full[0] and "LOG_FULL" not in line
        note(line)

    monkeypatch.setattr(LocalDisk, "free_bytes", lambda disk: 0 if is_disk_full[0] else real(disk))
    monkeypatch.setattr(system, "note", note_and_free_disk)
    monkeypatch.setattr(wait_reporter, "REPORT_AFTER_S", 0.5)
    local_or_remote.publish(create_lines(1))
    is_disk_full[0] = True
    time.sleep(0.2)
    if local_or_remote.addresses is not None:
        # The service checks free space when it commits, up to ten times per second.
        local_or_remote.publish(create_lines(1))
    result = local_or_remote.publish(create_lines(20))
    assert (result.status, result.lines[-1]["acknowledged"]) == (0, 20)
    # On a busy machine a wait for the connection is reported too.
    *_, wait_line, end_line = result.err.splitlines()
    assert wait_line.startswith("delta-prop: waiting, no answer for ")
    assert ": LOG_FULL: the disk has 0 bytes left, " in wait_line
    assert end_line.startswith("delta-prop: goes on after ")
    page = printed_in(sample("delta-prop publish changes.jsonl --to localhost:7373"))
    assert [mask_numbers(line) for line in (wait_line, end_line)] == [mask_numbers(line) for line in page[:2]]
    assert mask_numbers(result.out).startswith(mask_numbers(page[2].partition("…")[0]))


def report_lines(
    steps: list[tuple[float, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    get_cause: Callable[[], Exception | None] = lambda: FULL,
) -> list[str]:
    """Play events (`poll`, `progress`, `idle`, `busy`) at the given seconds; return the printed lines."""
    clock, busy = [0.0], [True]
    monkeypatch.setattr(wait_reporter.system, "now", lambda: clock[0])
    reporter = WaitReporter()
    reporter.get_cause, reporter.is_waiting = get_cause, lambda: busy[0]
    for seconds, event in steps:
        clock[0] = seconds
        if event == "progress":
            reporter.note_progress()
        elif event == "poll":
            reporter._poll(seconds)
        else:
            busy[0] = event == "busy"
            reporter._poll(seconds)
    return capsys.readouterr().err.splitlines()


def test_wait_is_reported_once_and_then_periodically(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        (1.0, "progress"),
        (3.5, "poll"),
        (4.1, "poll"),
        (10.0, "poll"),
        (34.2, "poll"),
        (40.0, "progress"),
    ]
    assert report_lines([*steps, (42.0, "poll"), (42.5, "progress")], monkeypatch, capsys) == [
        "delta-prop: waiting, no answer for 3 s: LOG_FULL: the disk is full",
        "delta-prop: waiting, no answer for 33 s: LOG_FULL: the disk is full",
        "delta-prop: goes on after 39 s",
    ]


def test_new_cause_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = iter([None, ConnectionRefusedError(111, "Connection refused"), FULL, None])
    steps = [(4.0, "poll"), (4.2, "poll"), (4.4, "poll"), (4.6, "poll")]
    assert report_lines(steps, monkeypatch, capsys, lambda: next(causes)) == [
        "delta-prop: waiting, no answer for 4 s: no answer has come yet",
        "delta-prop: waiting, no answer for 4 s: no connection ([Errno 111] Connection refused), retrying",
        "delta-prop: waiting, no answer for 4 s: LOG_FULL: the disk is full",
    ]


def test_waiting_for_input_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(0.0, "idle"), (50.0, "poll"), (51.0, "busy"), (52.0, "poll")]
    assert report_lines(steps, monkeypatch, capsys) == []
