"""Arguments accept times as dates, words and spans; a time in the future is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.cli import main
from delta_prop.client import Subscriber
from delta_prop.platform import system
from delta_prop.platform.dates import EPOCH, US, check_past, parse_time
from delta_prop.sinks import CallbackSink
from delta_prop.spark.options import read_options
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service
from tests.delta_prop.commands.support import Command, create_line

NOW = datetime(2026, 3, 15, 12, 30, 15, tzinfo=UTC)
NOW_US = (NOW - EPOCH) // US


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("today", datetime(2026, 3, 15, tzinfo=UTC)),
        ("yesterday", datetime(2026, 3, 14, tzinfo=UTC)),
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("1h", NOW - timedelta(hours=1)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("2d", NOW - timedelta(days=2)),
        ("1w", NOW - timedelta(days=7)),
        ("1h ago", NOW - timedelta(hours=1)),
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31 12:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    ],
)
def test_times_are_read(text: str, expected: datetime) -> None:
    assert parse_time(text, NOW_US) == (expected - EPOCH) // US


@pytest.mark.parametrize("text", ["", "h", "1y", "-1h", "1 h", "nan h", "1e3s", "soon", "9" * 30 + "d", "١h"])
def test_invalid_time_is_none(text: str) -> None:
    assert parse_time(text, NOW_US) is None


def test_time_in_the_future_is_refused() -> None:
    check_past("--at", "now", NOW_US, NOW_US)
    check_past("--at", "a little later", NOW_US + 30_000_000, NOW_US)  # clocks may differ a little
    with pytest.raises(UsageError, match=r"--at '2026-03-15T14.*in the future.*2026-03-15T12:30:15.*latest"):
        check_past("--at", "2026-03-15T14:00Z", NOW_US + 5_400_000_000, NOW_US)


VERBS: list[list[str]] = [
    ["subscribe", "--no-follow", "--start"],
    ["log", "show", "--start"],
    ["log", "export", "--start"],
    ["get", "v", "--at"],
    ["trace", "record", "--to", "OUT", "--start"],
    ["sinks", "reset", "audit", "--to"],
]


def attach_sink_once(command: Command) -> None:
    """Make a log with one delta and a registered sink."""

    async def publish_once() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(CallbackSink(lambda *_: None, name="audit"))
            ack = await p.publish(Delta("v", create([1.0])))
            await p.wait_visible(ack)

    anyio.run(publish_once)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb[:2]))
def test_verb_with_a_time_takes_words_and_refuses_the_future(
    verb: list[str], command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attach_sink_once(command)

    def run(time_text: str, name: str) -> tuple[int, str]:
        arguments = [str(tmp_path / name) if one == "OUT" else one for one in verb]
        result = command(*arguments, time_text)
        return result.status, result.err

    for number, time_text in enumerate(("1h", "yesterday", "today", "2d", "1h ago")):
        status, message = run(time_text, f"words-{number}")
        # No vector exists before the first delta.
        assert status == (1 if verb[0] == "get" else 0), (time_text, message)
    status, message = run("2099-01-01", "future")
    assert status == 2
    assert "in the future" in message
    status, message = run("soon", "none")
    assert status == 2
    assert "2026-01-31T12:00:00Z" in message
    assert "1h" in message


def test_recording_may_end_in_the_future(command: Command, tmp_path: Path) -> None:
    command.publish([create_line("v")])
    assert command("trace", "record", "--to", tmp_path / "out", "--until", "2099-01-01").status == 0


def test_token_expires_after_a_span(capsys: pytest.CaptureFixture[str]) -> None:
    before = system.wall_us()
    assert main(["token", "new", "a", "--subscribe", "--namespace", "*", "--expires", "30d"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("expires")]
    expires = datetime.fromisoformat(line.partition(" = ")[2])
    assert timedelta(0) <= expires - (EPOCH + before * US) - timedelta(days=30) < timedelta(minutes=5)
    for wrong in ("yesterday", "2020-01-01T00:00:00Z", "1h ago"):
        assert main(["token", "new", "a", "--subscribe", "--namespace", "*", "--expires", wrong]) == 2
        assert "has passed" in capsys.readouterr().err


def test_spark_options_take_time_words() -> None:
    options = read_options({"url": "a:1", "start": "1h", "end": "10m"}, {}, NOW_US)
    assert (options.start.time_us, options.end.time_us) == (NOW_US - 3_600_000_000, NOW_US - 600_000_000)
    with pytest.raises(UsageError, match=r"option start .*in the future"):
        read_options({"url": "a:1", "start": "2026-03-16"}, {}, NOW_US)


@pytest.mark.parametrize("start", ["soon", "", "2099-01-01", datetime(2099, 1, 1, tzinfo=UTC)])
def test_subscriber_refuses_an_invalid_or_future_start(start: Any) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(UsageError, match=r"in the future|give earliest, latest"):
            async with Subscriber(ADDRESS, "*", start=start, world=site.world):
                await anyio.sleep(1)

    with_service(scenario)


def test_subscriber_accepts_a_span_as_start() -> None:
    subscriber = Subscriber(ADDRESS, "*", start="1h")
    assert subscriber is not None
