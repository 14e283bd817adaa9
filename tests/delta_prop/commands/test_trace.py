"""`trace record` and `trace show`: of a directory and of a server, whole, in parts, and broken off."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from delta_prop.commands import trace_record
from delta_prop.recorded_traffic import RecordedTraffic
from tests.delta_prop.commands.served import served
from tests.delta_prop.commands.support import Command, created, many

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop.recorded_traffic import RecordedBatch


def recorded(path: Path) -> list[RecordedBatch]:
    found = RecordedTraffic(lambda: [path.read_bytes()])
    batches = list(found.batches())
    assert found.fault is None
    return batches


def rows(batches: list[RecordedBatch]) -> int:
    return sum(batch.count for batch in batches)


def test_a_directory_is_recorded_without_names_and_content(command: Command, tmp_path: Path) -> None:
    command.publish([created("secret-1", 0.5, 0.25, namespace="hidden"), *many(300)], "--producer", "hushed")
    to = tmp_path / "a.trace"
    done = command("trace", "record", "--to", to)
    assert (done.status, done.err) == (0, "")
    assert done.lines[0]["deltas"] == rows(recorded(to)) == 301
    assert done.lines[0]["bytes"] == to.stat().st_size
    for name in (b"secret", b"hidden", b"hushed"):
        assert name not in to.read_bytes()


def test_what_a_server_takes_from_now_on_is_recorded(command: Command, tmp_path: Path) -> None:
    command.publish(many(5))
    to = tmp_path / "a.trace"
    with served(command.data) as places:
        at = ["--from", places.to, "--to", str(to)]
        assert main(["trace", "record", *at, "--for", "0.1s"]) == 0
        assert rows(recorded(to)) == 0
        to.unlink()
        assert main(["trace", "record", *at, "--start", "earliest", "--until", "latest"]) == 0
    batches = recorded(to)
    assert rows(batches) == 5
    assert all(batch.time_us > 10**15 for batch in batches)


def test_a_part_ends_where_it_was_said(command: Command, tmp_path: Path) -> None:
    for n in range(3):
        command.publish([created(f"v{n}")])
    times = [row["time"] for row in command("log", "show", "--json").lines]
    for arguments, expected in (
        (["--start", "1"], 2),
        (["--until", "1"], 1),
        (["--start", times[1]], 2),
        (["--until", "earliest"], 0),
        (["--for", "0.0s"], 0),
        (["--start", "latest"], 0),
    ):
        to = tmp_path / "-".join(arguments).replace("/", "")
        assert command("trace", "record", "--to", to, *arguments).status == 0
        assert rows(recorded(to)) == expected, arguments


def test_show_tells_it_in_numbers(command: Command, tmp_path: Path) -> None:
    command.publish([*many(300), *many(10)])
    to = tmp_path / "a.trace"
    command("trace", "record", "--to", to)
    capsys = command._capsys
    capsys.readouterr()
    assert main(["trace", "show", str(to), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["deltas"], told["vectors"], told["operations"]) == (310, 300, {"create": 310})
    assert (told["whole"], told["busiest_second"] > 100) == (True, True)
    assert main(["trace", "show", str(to)]) == 0
    assert "310 deltas in" in capsys.readouterr().out


def test_a_recording_that_was_broken_off_is_shown_as_such(command: Command, tmp_path: Path) -> None:
    command.publish(many(10))
    to = tmp_path / "a.trace"
    command("trace", "record", "--to", to)
    to.write_bytes(to.read_bytes()[:-1])
    command._capsys.readouterr()
    assert main(["trace", "show", str(to)]) == 0
    shown = command._capsys.readouterr()
    assert "10 deltas" in shown.out
    assert "truncated" in shown.err


def test_an_interrupted_recording_is_whole(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.publish(many(10))
    to = tmp_path / "a.trace"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_record.system.Progress, "report", interrupted)
    assert command("trace", "record", "--to", to).status == 130
    assert recorded(to)  # what had come, and that it ended well


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["record", "--to", "x", "--for", "10"], "give a time like 90s"),
        (["record", "--to", "x", "--for=-1s"], "give a time like 90s"),
        (["record", "--to", "x", "--start", "soon"], "--start 'soon'"),
        (["record", "--to", "x", "--start", "99"], "the log ends at offset 3"),
        (["record", "--to", "no/such/folder"], "cannot be created"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], why: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command.publish(many(3))
    done = command("trace", *arguments)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert why in done.err
    assert not (tmp_path / "x").exists()


def test_what_is_no_recording_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("{}")
    for path, why in (("a", "not a traffic recording"), ("b", "cannot be read")):
        assert main(["trace", "show", str(tmp_path / path)]) == 2
        assert why in capsys.readouterr().err


def test_the_rate_is_that_of_the_time_that_is_shown(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.publish(many(300))
    to = tmp_path / "a.trace"
    hour_later = trace_record.system.wall_us() + 3_600_000_000
    monkeypatch.setattr(trace_record.system, "wall_us", lambda: hour_later)
    command("trace", "record", "--to", to)
    command._capsys.readouterr()
    assert main(["trace", "show", str(to), "--json"]) == 0
    told = json.loads(command._capsys.readouterr().out)
    assert told["span_s"] < 60
    assert told["deltas_per_s"] == round(300 / max(told["span_s"], 1.0), 1)
    assert told["ended"] > told["last"]
