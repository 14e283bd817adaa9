"""`trace record` and `trace show` of a directory and of a server: complete, partial and interrupted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.cli import main
from delta_prop.commands import trace_record
from delta_prop.directory.recorded_traffic import RecordedTraffic
from delta_prop.hosting.streams import Streams
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.server_thread import hosted_streams, served
from tests.delta_prop.commands.support import Command, create_line, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop.directory.recorded_traffic import RecordedBatch


def read_recording(path: Path) -> list[RecordedBatch]:
    traffic = RecordedTraffic([path.read_bytes()])
    batches = list(traffic.batches())
    assert traffic.fault is None
    return batches


def count_deltas(batches: list[RecordedBatch]) -> int:
    return sum(batch.count for batch in batches)


def test_recording_of_a_directory_holds_no_names_or_content(command: Command, tmp_path: Path) -> None:
    command.publish(
        [create_line("secret-1", 0.5, 0.25, namespace="hidden"), *create_lines(300)], "--producer", "hushed"
    )
    recording = tmp_path / "a.trace"
    result = command("trace", "record", "--to", recording)
    assert (result.status, result.err) == (0, "")
    assert result.lines[0]["deltas"] == count_deltas(read_recording(recording)) == 301
    assert result.lines[0]["bytes"] == recording.stat().st_size
    for name in (b"secret", b"hidden", b"hushed"):
        assert name not in recording.read_bytes()


def test_recording_of_a_server_begins_now_unless_a_start_is_given(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(5))
    recording = tmp_path / "a.trace"
    with served(command.data) as addresses:
        common = ["--from", addresses.protocol_address, "--to", str(recording)]
        assert main(["trace", "record", *common, "--for", "0.1s"]) == 0
        assert count_deltas(read_recording(recording)) == 0
        recording.unlink()
        assert main(["trace", "record", *common, "--start", "earliest", "--until", "latest"]) == 0
    batches = read_recording(recording)
    assert count_deltas(batches) == 5
    assert all(batch.time_us > 10**15 for batch in batches)


def test_recording_covers_only_the_requested_part(command: Command, tmp_path: Path) -> None:
    for n in range(3):
        command.publish([create_line(f"v{n}")])
    times = [row["time"] for row in command("log", "show", "--json").lines]
    for arguments, expected in (
        (["--start", "1"], 2),
        (["--until", "1"], 1),
        (["--start", times[1]], 2),
        (["--until", "earliest"], 0),
        (["--for", "0.0s"], 0),
        (["--start", "latest"], 0),
    ):
        recording = tmp_path / "-".join(arguments).replace("/", "")
        assert command("trace", "record", "--to", recording, *arguments).status == 0
        assert count_deltas(read_recording(recording)) == expected, arguments


@pytest.fixture
def two_streams(command: Command) -> Command:
    """A directory with three deltas in the stream default, and one and two in the partitions of another."""

    async def fill() -> None:
        async with Streams(data=command.data) as streams:
            await streams.create("orders", 2)
            for place, count in ((("default", 0), 3), (("orders", 0), 1), (("orders", 1), 2)):
                p = await streams.open(*place)
                await p.publish(*(Delta(f"v{row}", create([1.0])) for row in range(count)))

    anyio.run(fill)
    return command


PLACES = [
    ((), 3),
    (("--stream", "orders", "--partition", "0"), 1),
    (("--stream", "orders", "--partition", "1"), 2),
]


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_recording_is_that_of_the_named_partition(
    place: tuple[str, ...], count: int, two_streams: Command, tmp_path: Path
) -> None:
    of_directory, of_server = tmp_path / "directory.trace", tmp_path / "server.trace"
    assert two_streams("trace", "record", "--to", of_directory, *place).status == 0
    assert count_deltas(read_recording(of_directory)) == count
    with hosted_streams(two_streams.data) as addresses:
        source = ["trace", "record", "--from", addresses.protocol_address, *place]
        span = ["--start", "earliest", "--until", "latest", "--to", str(of_server)]
        assert main([*source, *span]) == 0
    assert count_deltas(read_recording(of_server)) == count


def test_recording_needs_the_name_of_one_of_several_partitions(two_streams: Command, tmp_path: Path) -> None:
    for place, reason in (
        (("--stream", "orders"), "stream 'orders' has 2 partitions: name one with --partition"),
        (("--stream", "nosuch"), "unknown"),
    ):
        result = two_streams("trace", "record", "--to", tmp_path / "a.trace", *place)
        assert (result.status > 0, result.err.count("\n")) == (True, 1)
        assert reason in result.err
        assert not (tmp_path / "a.trace").exists()


def test_show_prints_the_numbers_of_a_recording(command: Command, tmp_path: Path) -> None:
    command.publish([*create_lines(300), *create_lines(10)])
    recording = tmp_path / "a.trace"
    command("trace", "record", "--to", recording)
    capsys = command.capsys
    capsys.readouterr()
    assert main(["trace", "show", str(recording), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["deltas"], summary["vectors"], summary["operations"]) == (310, 300, {"create": 310})
    assert (summary["whole"], summary["busiest_second"] > 100) == (True, True)
    assert main(["trace", "show", str(recording)]) == 0
    assert "310 deltas in" in capsys.readouterr().out


def test_truncated_recording_is_shown_with_a_warning(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(10))
    recording = tmp_path / "a.trace"
    command("trace", "record", "--to", recording)
    recording.write_bytes(recording.read_bytes()[:-1])
    command.capsys.readouterr()
    assert main(["trace", "show", str(recording)]) == 0
    captured = command.capsys.readouterr()
    assert "10 deltas" in captured.out
    assert "truncated" in captured.err


def test_interrupted_recording_is_complete(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.publish(create_lines(10))
    recording = tmp_path / "a.trace"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_record.system.Progress, "report", interrupted)
    assert command("trace", "record", "--to", recording).status == 130
    assert read_recording(recording)  # the recording has the batches so far and ends properly


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--to", "x", "--for", "10"], "give a time like 90s"),
        (["record", "--to", "x", "--for=-1s"], "give a time like 90s"),
        (["record", "--to", "x", "--start", "soon"], "--start 'soon'"),
        (["record", "--to", "x", "--start", "99"], "the log ends at offset 3"),
        (["record", "--to", "no/such/folder"], "cannot be created"),
    ],
)
def test_mistake_is_reported_in_one_line(
    arguments: list[str], message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command.publish(create_lines(3))
    result = command("trace", *arguments)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert message in result.err
    assert not (tmp_path / "x").exists()


def test_invalid_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("{}")
    for path, message in (("a", "not a traffic recording"), ("b", "cannot be read")):
        assert main(["trace", "show", str(tmp_path / path)]) == 2
        assert message in capsys.readouterr().err


def test_rate_covers_only_the_span_that_is_shown(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.publish(create_lines(300))
    recording = tmp_path / "a.trace"
    hour_later = trace_record.system.wall_us() + 3_600_000_000
    monkeypatch.setattr(trace_record.system, "wall_us", lambda: hour_later)
    command("trace", "record", "--to", recording)
    command.capsys.readouterr()
    assert main(["trace", "show", str(recording), "--json"]) == 0
    summary = json.loads(command.capsys.readouterr().out)
    assert summary["span_s"] < 60
    assert summary["deltas_per_s"] == round(300 / max(summary["span_s"], 1.0), 1)
    assert summary["ended"] > summary["last"]
