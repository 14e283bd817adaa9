"""Programs can parse the server's log, clients cannot forge its lines, and slow readers delay nobody."""

from __future__ import annotations

import io
import json
import logging
import threading
import warnings

import pytest

from delta_prop.commands.server_logging import LineHandler, TextFormatter, write_logs_to

LOGGER = logging.getLogger("delta_prop.audit")


def test_json_lines_hold_the_fields_of_a_record() -> None:
    out = io.StringIO()
    with write_logs_to(out, level="info", format_="auto"):
        LOGGER.warning("refused %s", "a\nb", extra={"peer": "1.2.3.4:5", "code": 6, "what": {1}})
        LOGGER.debug("not told")
        try:
            raise ValueError("odd")
        except ValueError:
            LOGGER.exception("broke")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", stacklevel=1)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["message"].partition(":")[0] for one in records][:2] == ["refused a\nb", "broke"]
    first = records[0]
    assert first["time"].endswith("Z")
    assert (first["level"], first["logger"]) == ("warning", "delta_prop.audit")
    assert (first["peer"], first["code"], first["what"]) == ("1.2.3.4:5", 6, "{1}")
    assert "ValueError: odd" in records[1]["exception"]
    assert "old" in records[2]["message"]


def test_text_record_is_one_line_for_any_client_text() -> None:
    out = io.StringIO()
    with write_logs_to(out, level="warning", format_="text"):
        LOGGER.warning("refused", extra={"token": "x\n2026 error \x1b[2J"})
        LOGGER.info("not told")
    (line,) = out.getvalue().splitlines()
    assert line.endswith("warning refused token=x\\n2026 error \\x1b[2J")


def test_logging_setup_is_undone_at_the_end() -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    threads = threading.active_count()
    with write_logs_to(io.StringIO(), level="debug", format_="json"):
        assert logging.getLogger("delta_prop").level == logging.DEBUG
    assert (root.handlers, threading.active_count()) == (before, threads)
    assert logging.getLogger("delta_prop").level == logging.NOTSET


class _BlockedStream(io.StringIO):
    """A stream whose writes block until `unblocked` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.unblocked, self.write_began = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.write_began.set()
        self.unblocked.wait(10)
        return super().write(text)


def test_unread_log_blocks_no_caller_and_lost_lines_are_counted() -> None:
    out = _BlockedStream()
    handler = LineHandler(out, lines_max=4)
    handler.setFormatter(TextFormatter())

    def log(number: int) -> None:
        handler.emit(logging.makeLogRecord({"msg": f"line {number}", "levelname": "INFO"}))

    log(0)
    assert out.write_began.wait(10)  # the thread has taken the line and blocks
    for number in range(1, 8):
        log(number)
    out.unblocked.set()
    while handler._lines.qsize():
        threading.Event().wait(0.001)
    log(8)
    handler.close()
    lines = [line.partition(" ")[2].split(maxsplit=1)[1] for line in out.getvalue().splitlines()]
    assert lines[:5] == [f"line {n}" for n in range(5)]
    assert lines[5].endswith("standard error is read too slowly lines=3")
    assert lines[6:] == ["line 8"]


def test_log_to_a_broken_pipe_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out, attempts = io.StringIO(), []

    def fail_write(text: str) -> int:
        attempts.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(out, "write", fail_write)
    with write_logs_to(out, level="info", format_="json"):
        LOGGER.warning("one")
        LOGGER.warning("two")
    assert attempts
