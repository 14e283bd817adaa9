"""`log show`, `log verify` and `log export` report the position of corruption, and skip it on request."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.retention.compaction import run_to_end
from tests.broker.durable import SMALL, Clock, Writer, commit, open_log
from tests.delta_prop.commands.support import create_line, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.support import Command


FRAMES, ROWS = 5, 4
NEWER_FORMAT = b'{"format": 3, "made_by": "later"}'


def publish_frames(command: Command) -> None:
    """Publish frames of equal size, each with several rows, because the lines of one import share a frame."""
    for _ in range(FRAMES):
        command.publish(same_size_lines(ROWS))


def corrupt_frame(command: Command, number: int) -> int:
    """Change one byte in the body of a frame of `publish_frames`; return the start of that frame."""
    path = command.segment()
    raw = bytearray(path.read_bytes())
    position = len(raw) // FRAMES * number
    raw[position + 80] ^= 1
    path.write_bytes(raw)
    return position


def same_size_lines(count: int) -> list[str]:
    return [create_line(f"v{n:03}", float(n)) for n in range(count)]


def test_show_prints_a_line_per_delta_and_noop(command: Command) -> None:
    wrong = json.dumps({"vector_id": "a", "op": "sparse", "indices": [9], "values": [1]})
    command.publish([create_line("a"), create_line("b", namespace="docs"), wrong])
    rows = command("log", "show", "--json").lines
    assert [(row["offset"], row["lamport"], row["op"]) for row in rows] == [
        (0, 1, "create"),
        (1, 2, "create"),
        (2, 3, "noop"),
    ]
    assert rows[2]["error"] == "INVALID_DELTA"
    table = command("log", "show", "--start", "1", "--count", "2").out.splitlines()
    assert [line.split()[0] for line in table] == ["offset", "1", "2"]
    assert "docs b" in table[1]
    assert "INVALID_DELTA" in table[2]


def test_verify_accepts_a_valid_log_that_a_writer_has_locked(command: Command) -> None:
    command.publish(create_lines(5))
    lock = LocalDisk(command.data).lock("lock")
    result = command("log", "verify", "--json")
    assert result.status == 0
    report = result.lines[0]
    assert report["intact"] is True
    assert (report["deltas"], report["start_offset"], report["next_offset"], report["corruptions"]) == (
        5,
        0,
        5,
        0,
    )
    assert report["bytes"] == command.segment().stat().st_size
    assert "offsets 0 to 5: intact\n" in command("log", "verify").out
    lock.release()


def test_verify_accepts_a_torn_tail_that_was_never_synced(command: Command) -> None:
    command.publish(create_lines(5))
    with command.segment().open("ab") as file:
        file.write(b"\xd3" + b"half a frame")
    result = command("log", "verify", "--json")
    assert (result.status, result.lines[0]["torn_tail"], result.lines[0]["deltas"]) == (0, True, 5)
    assert "never synced" in command("log", "verify").out


def test_corruption_is_reported_with_file_and_offsets(command: Command) -> None:
    publish_frames(command)
    position = corrupt_frame(command, 2)
    result = command("log", "verify", "--json")
    assert result.status == 1
    corruption = result.lines[0]["first_corruption"]
    assert command.data / corruption["file"] == command.segment()
    assert (corruption["position"], corruption["start_offset"], corruption["next_offset"]) == (
        position,
        8,
        12,
    )
    result = command("log", "verify")
    assert result.status == 1
    assert f"byte {position}, offset 8 to 12" in result.err
    assert "--skip-corrupt" in result.err
    assert "log verify" not in result.err
    assert command("status").status == 1
    refused = command.publish(same_size_lines(1))
    assert refused.status == 1
    assert "log verify" in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"5", b"[]", b"null", b'{"format": "x"}', b"", b"\xff"])
def test_corrupted_format_file_prevents_neither_verify_nor_export(
    command: Command, tmp_path: Path, content: bytes
) -> None:
    publish_frames(command)
    intact = (command.data / "format").read_bytes()
    (command.data / "format").write_bytes(content)
    refused = command("status")
    assert refused.status == 1
    assert f"its {len(content)} bytes are not a format file" in refused.err
    assert "copy the format file of a data directory that the same version made" in refused.err
    result = command("log", "verify", "--json")
    assert (result.status, result.lines[0]["corruptions"], result.lines[0]["deltas"]) == (1, 1, FRAMES * ROWS)
    assert command("log", "export", "--skip-corrupt", "--output", tmp_path / "out").status == 0
    assert len((tmp_path / "out").read_text().splitlines()) == FRAMES * ROWS
    (command.data / "format").write_bytes(intact)
    assert command("log", "verify").status == 0


@pytest.mark.parametrize("verb", [("status",), ("log", "show"), ("publish", "/dev/null")])
def test_corruption_report_names_the_corrupted_file(verb: tuple[str, ...], command: Command) -> None:
    command.publish(create_lines(3))
    corrupted_file = command.data / "streams/default/0/log"
    intact = corrupted_file.read_bytes()
    corrupted_file.write_bytes(bytes(8))
    result = command(*verb)
    assert f"corruption in {corrupted_file}: its 8 bytes do not fit their checksum" in result.out + result.err
    corrupted_file.write_bytes(intact)
    segment = command.segment()
    segment.write_bytes(segment.read_bytes()[:30] + b"?" + segment.read_bytes()[31:])
    if verb == ("log", "show"):
        assert f"corruption in {segment}, byte " in command(*verb).err
    for format_, message in (
        (b"{}", f"corruption in {command.data}/format: "),
        (NEWER_FORMAT, f"{command.data}/format has"),
    ):
        (command.data / "format").write_bytes(format_)
        assert message in command(*verb).err


def test_export_with_skip_corrupt_leaves_out_corrupted_rows(command: Command, tmp_path: Path) -> None:
    publish_frames(command)
    corrupt_frame(command, 2)
    refused = command("log", "export", "--output", tmp_path / "a")
    assert refused.status == 1
    assert "offset 8 to 12" in refused.err
    result = command("log", "export", "--skip-corrupt", "--output", tmp_path / "b")
    assert result.status == 0
    assert "skipped" in result.err
    assert "offset 8 to 12" in result.err
    lines = [json.loads(line) for line in (tmp_path / "b").read_text().splitlines()]
    assert [line["offset"] for line in lines] == [*range(8), *range(12, FRAMES * ROWS)]


def test_exported_lines_can_be_published(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(6))
    out = tmp_path / "saved.jsonl"
    assert command("log", "export", "--output", out, "--start", "1", "--count", "4").status == 0
    result = command("publish", out, "--acks")
    assert [ack["offset"] for ack in result.lines[:-1]] == [6, 7, 8, 9]
    rows = command("log", "show", "--json").lines
    assert [row["vector_id"] for row in rows[6:]] == ["v1", "v2", "v3", "v4"]


def test_exported_frames_equal_the_bytes_of_the_log(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(6))
    assert command("log", "export", "--format", "frames", "--output", tmp_path / "f").status == 0
    assert (tmp_path / "f").read_bytes() == command.segment().read_bytes()


def test_export_overwrites_no_file(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(1))
    (tmp_path / "mine").write_text("precious")
    result = command("log", "export", "--output", tmp_path / "mine")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("start", ["latest", "now", "99"])
def test_export_from_beyond_the_end_is_empty(start: str, command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(2))
    assert command("log", "export", "--start", start, "--output", tmp_path / "e").status == 0
    assert (tmp_path / "e").read_bytes() == b""


@pytest.mark.parametrize(
    ("start", "message"),
    [("99", "--start 99: the log ends at offset 2: give that, or latest"), ("-1", "--start '-1'")],
)
def test_show_from_an_invalid_start_is_refused(start: str, message: str, command: Command) -> None:
    command.publish(create_lines(2))
    result = command("log", "show", f"--start={start}")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
    assert command("log", "show", "--start=2").status == 0  # the next offset is a valid start


# --- a compacted log


def make_compacted_log(command: Command, *, all_segments: bool) -> int:
    """Make a log with its older segments, or all, compacted into a snapshot; return its start offset."""
    settings = replace(SMALL, compact=True, segment_bytes_max=600, retention_s=1.0, segment_s_max=1.0)
    clock = Clock()
    log, _ = open_log(LocalDisk(command.data), settings, clock=clock)
    writer = Writer(log)
    for _ in range(12):
        writer.append()
        commit(log)
    clock.wait(60)
    if all_segments:
        assert log.roll()
        commit(log)
    compaction = log.take_compaction()
    assert compaction is not None
    log.finish_compaction(compaction, made=run_to_end(compaction))
    assert log.retain()
    commit(log, sync=True)
    start = log.start_offset
    assert (start == log.next_offset == 24) is all_segments
    log.close()
    return start


@pytest.mark.parametrize("all_segments", [False, True])
def test_verify_compacted_log_reports_its_range_and_snapshot(command: Command, all_segments: bool) -> None:
    start = make_compacted_log(command, all_segments=all_segments)
    report = command("log", "verify", "--json").lines[0]
    assert (report["intact"], report["start_offset"], report["next_offset"]) == (True, start, 24)
    assert (report["snapshots"], report["snapshot_offset"], report["snapshot_rows"]) == (1, start, start)
    out = command("log", "verify").out
    assert f"offsets {start} to 24: intact\n" in out
    assert f"snapshot of {start} rows at offset {start}: intact\n" in out
    assert f"offsets before {start}: only the snapshot has them\n" in out
    assert command("status", "--json").lines[0]["start_offset"] == start


def test_verify_corrupted_snapshot_reports_the_file(command: Command) -> None:
    make_compacted_log(command, all_segments=True)
    (path,) = command.data.glob("streams/default/0/*.snapshot")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    result = command("log", "verify", "--json")
    assert (result.status, result.lines[0]["snapshots"]) == (1, 0)
    assert result.lines[0]["first_corruption"]["file"].endswith(path.name)


def test_verify_snapshot_beyond_the_end_is_corruption(command: Command) -> None:
    make_compacted_log(command, all_segments=True)
    (segment,) = command.data.glob("streams/default/0/*.log")
    segment.unlink()
    (command.data / "streams/default/0/mark").unlink()
    result = command("log", "verify", "--json")
    assert result.status == 1
    assert result.lines[0]["corruptions"] == 2
    assert "the log ends at offset 0, before this file" in command("log", "verify").err


@pytest.mark.parametrize("corrupted", ["checkpoint", "part", "removed"])
def test_verify_reads_checkpoints_and_their_parts(command: Command, corrupted: str) -> None:
    command.publish(create_lines(5))
    assert command("log", "verify", "--json").lines[0]["checkpoints"] == 1
    assert "checkpoints: 1, intact\n" in command("log", "verify").out
    suffix = "checkpoint" if corrupted == "checkpoint" else "part"
    path = next(iter(command.data.glob(f"streams/default/0/*.{suffix}")))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    if corrupted == "removed":
        path.unlink()
    result = command("log", "verify", "--json")
    assert (result.status, result.lines[0]["checkpoints"]) == (1, 0)
    assert result.lines[0]["first_corruption"]["file"].endswith(path.name)


def test_export_reports_removed_offsets_that_only_a_snapshot_has(command: Command, tmp_path: Path) -> None:
    start = make_compacted_log(command, all_segments=True)
    expected = f"skipped: offsets 0 to {start}, which the log has removed"
    for number, more in enumerate(((), ("--skip-corrupt",), ("--start", "5"))):
        out = tmp_path / f"out{number}"
        result = command("log", "export", "--output", out, *more)
        assert (result.status, out.read_bytes()) == (0, b"")
        assert (expected.replace("offsets 0", "offsets 5") if "--start" in more else expected) in result.err
    assert command("log", "export", "--start", start, "--output", tmp_path / "rest").err == ""


def test_show_from_removed_offsets_reports_that_it_skips_them(command: Command) -> None:
    start = make_compacted_log(command, all_segments=False)
    result = command("log", "show", "--start", "2", "--json")
    assert result.lines[0]["offset"] == start
    assert f"skipped: offsets 2 to {start}, which the log has removed" in result.err
    assert command("log", "show", "--json").err == ""
