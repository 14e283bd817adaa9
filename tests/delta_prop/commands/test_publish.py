"""`publish`: each line has one effect and one answer, even if processes are killed and lines are resent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.client import producer_state
from delta_prop.commands import publish, publishers
from delta_prop.platform import system
from delta_prop_broker.local_disk import LocalDisk, LocalFile
from delta_prop_sinks import CallbackSink
from delta_prop_wire.codec import NEED_BYTES, Decoder
from delta_prop_wire.errors import Refused
from delta_prop_wire.jsonlines import LINE_BYTES_MAX
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.commands.support import create_line, create_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from tests.delta_prop.commands.support import Command, VerbResult


def acks_by_line(result: VerbResult) -> dict[int, dict[str, Any]]:
    by_line = {ack["line"]: ack for ack in result.lines[:-1]}
    assert len(by_line) == len(result.lines) - 1
    return by_line


def test_each_line_is_acked_and_totals_are_printed_last(local_or_remote: Command) -> None:
    result = local_or_remote.publish(create_lines(3), "--acks")
    assert result.status == 0
    assert result.lines[:-1] == [{"line": n + 1, "offset": n, "duplicate": False} for n in range(3)]
    totals = result.lines[-1]
    assert totals.pop("seconds") >= 0
    assert totals == {
        "lines": 3,
        "acknowledged": 3,
        "duplicates": 0,
        "refused": 0,
        "forgotten": 0,
        "unanswered": 0,
        "next_offset": 3,
    }
    assert result.err == ""


def test_without_acks_only_totals_are_printed(local_or_remote: Command) -> None:
    result = local_or_remote.publish(create_lines(3))
    assert [line["acknowledged"] for line in result.lines] == [3]


def test_lines_without_a_producer_are_new_each_time(local_or_remote: Command) -> None:
    local_or_remote.publish(create_lines(2))
    assert local_or_remote.publish(create_lines(2), "--acks").lines[0]["offset"] == 2


def test_same_lines_of_one_producer_have_one_effect(local_or_remote: Command) -> None:
    first = acks_by_line(local_or_remote.publish(create_lines(5), "--producer", "import", "--acks"))
    second = local_or_remote.publish(create_lines(8), "--producer", "import", "--acks")
    answers = acks_by_line(second)
    assert [answers[n]["offset"] for n in range(1, 9)] == list(range(8))
    assert [answers[n]["duplicate"] for n in range(1, 9)] == [True] * 5 + [False] * 3
    assert [answers[n]["offset"] for n in first] == [first[n]["offset"] for n in first]
    assert second.lines[-1]["duplicates"] == 5
    shown = local_or_remote("log", "show", "--json").lines
    assert [row["vector_id"] for row in shown] == [f"v{n}" for n in range(8)]
    assert {row["dot"].partition(":")[2] for row in shown} == {str(n) for n in range(1, 9)}


MIXED = [
    "no JSON",
    create_line("a", 1.0),
    "",
    create_line("a", 2.0, priority="high"),
    json.dumps({"vector_id": "a", "op": "sparse", "indices": [9], "values": [1]}),
    json.dumps({"vector_id": "a", "op": "transform", "name": "t"}),
    json.dumps({"vector_id": "a", "op": "scale", "factor": 3, "source": "replica"}),
]


def test_only_bad_lines_are_refused_and_a_second_run_agrees(local_or_remote: Command) -> None:
    result = local_or_remote.publish(MIXED, "--producer", "mixed", "--acks")
    assert result.status == 1
    answers = acks_by_line(result)
    assert {n: answers[n].get("error", "") for n in answers} == {
        1: "INVALID_DELTA",
        2: "",
        4: "",
        5: "INVALID_DELTA",
        6: "INVALID_DELTA",
        7: "",
    }
    assert all(answers[n]["message"] for n in (1, 5, 6))
    assert result.lines[-1]["refused"] == 3
    second = local_or_remote.publish(MIXED, "--producer", "mixed", "--acks")
    second_answers = acks_by_line(second)
    assert second.status == 1
    for n, ack in answers.items():
        assert second_answers[n].get("error") == ack.get("error")
        assert second_answers[n].get("offset") == ack.get("offset")
        assert second_answers[n].get("duplicate") in (None, True)


def test_line_replacing_a_refused_one_is_refused_as_dot_reused(local_or_remote: Command) -> None:
    local_or_remote.publish(["no JSON", create_line("a")], "--producer", "corrected")
    result = local_or_remote.publish(
        [create_line("b"), create_line("a")], "--producer", "corrected", "--acks"
    )
    answers = acks_by_line(result)
    assert answers[1]["error"] == "DOT_REUSED"
    assert "another producer name" in answers[1]["message"]
    assert answers[2]["duplicate"] is True


def test_lines_with_delta_map_field_names_have_the_same_effect(local_or_remote: Command) -> None:
    fields: list[dict[str, Any]] = [
        {"op": "create", "values": [1.0, 2.0]},
        {"op": "scale", "values": [3]},
        {"op": "scale", "values": [3, 4]},
        {"op": "offset", "values": [1]},
    ]
    result = local_or_remote.publish([json.dumps({"vector_id": "v"} | one) for one in fields], "--acks")
    assert result.status == 1
    answers = acks_by_line(result)
    assert [answers[line].get("error") for line in (1, 2, 3, 4)] == [None, None, "INVALID_DELTA", None]
    assert "values: 2 numbers" in answers[3]["message"]
    assert local_or_remote("get", "v").lines[0]["vector"] == [4.0, 7.0]


def test_refused_lines_without_acks_go_to_standard_error(local_or_remote: Command) -> None:
    result = local_or_remote.publish(["no JSON", create_line("a")])
    assert result.status == 1
    assert result.err.startswith("delta-prop: line 1: INVALID_DELTA")
    assert result.err.count("\n") == 1


def test_duplicate_id_is_acked_with_its_first_offset(local_or_remote: Command) -> None:
    line = create_line("a", id="00" * 16)
    local_or_remote.publish([line])
    result = local_or_remote.publish([line], "--acks")
    assert result.lines[0] == {"line": 1, "offset": 0, "duplicate": True}


def test_more_lines_than_the_in_flight_maximum_are_acked(
    local_or_remote: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "IN_FLIGHT_MAX", 3)
    assert local_or_remote.publish(create_lines(50)).lines[-1]["acknowledged"] == 50


def test_several_files_are_one_stream_of_lines(local_or_remote: Command, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(create_line("a"))  # no newline at the end
    (tmp_path / "b").write_text(create_line("b") + "\r\n" + create_line("c"))
    result = local_or_remote("publish", tmp_path / "a", tmp_path / "b", "--acks")
    assert [ack["line"] for ack in result.lines[:-1]] == [1, 2, 3]


def test_too_long_line_is_refused_and_skipped(
    local_or_remote: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_prop.platform.system.LINE_BYTES_MAX", 200)
    monkeypatch.setattr("delta_prop_wire.jsonlines.LINE_BYTES_MAX", 200)
    monkeypatch.setattr("delta_prop.platform.system._CHUNK_BYTES", 64)
    result = local_or_remote.publish(["x" * 1000, create_line("a")], "--acks")
    answers = acks_by_line(result)
    assert "split" in answers[1]["message"]
    assert answers[2]["offset"] == 0


def test_too_long_line_is_reported_with_its_bound(command: Command) -> None:
    answers = acks_by_line(command.publish(["x" * (LINE_BYTES_MAX + 2_000_000)], "--acks"))
    assert answers[1]["message"] == f"line: more than {LINE_BYTES_MAX} bytes: split the delta"


def test_unreadable_file_is_named(command: Command) -> None:
    result = command("publish", "/proc/self/mem")  # the file opens, but reading its first page fails
    assert result.status == 1
    assert "'/proc/self/mem' cannot be used (Input/output error)" in result.err


def test_directory_in_use_is_refused_in_one_line(command: Command) -> None:
    command.publish(create_lines(1))
    lock = LocalDisk(command.data).lock("lock")
    for result in (command.publish(create_lines(1)), command("sinks", "forget", "a")):
        assert result.status == 1
        assert result.err.count("\n") == 1
        assert f"locked by process {os.getpid()}: stop that one, or name another" in result.err
        assert "Errno" not in result.err
    assert command("status", "--json").lines[0]["writer"] == os.getpid()
    lock.release()
    assert command("status", "--json").lines[0]["writer"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["publish", "/nowhere/at/all"], "cannot be read"),
        (["publish", "/"], "directory"),
        (["publish", "--ack-level", "sure"], "invalid choice"),
        (["publish", "/dev/null", "--producer", ""], "producer: 0 bytes"),
    ],
)
def test_mistake_is_reported_in_one_line(arguments: list[str], message: str, command: Command) -> None:
    result = command(*arguments)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1


# --- frames


def test_import_makes_few_frames(local_or_remote: Command, tmp_path: Path, full: bool) -> None:
    count = 20_000 if full else 6_000
    lines = [create_line(f"v{n % (count // 4)}", float(n), 1.0) for n in range(count)]
    result = local_or_remote.publish(lines, "--producer", "import")
    assert result.lines[-1]["acknowledged"] == count
    frames, size = frames_of(local_or_remote, tmp_path / "frames")
    print(f"{frames} frames, {size / count:.0f} bytes a line, {result.lines[-1]['seconds']} s")
    assert frames <= count / 200
    assert size <= 40 * count


def test_refused_lines_do_not_change_other_offsets(local_or_remote: Command, tmp_path: Path) -> None:
    lines = [
        json.dumps({"vector_id": "v0", "op": "sparse", "indices": [9], "values": [1]})
        if n % 250 == 17
        else create_line(f"v{n % 50}", float(n))
        for n in range(1_000)
    ]
    for _ in range(2):
        result = local_or_remote.publish(lines, "--producer", "import", "--acks")
        answers = acks_by_line(result)
        assert [n for n, ack in answers.items() if "error" in ack] == [18, 268, 518, 768]
        assert [ack["offset"] for ack in answers.values() if "offset" in ack] == [
            n for n in range(1_000) if n % 250 != 17
        ]
    frames, _ = frames_of(local_or_remote, tmp_path / "frames")
    assert frames <= 80


def frames_of(command: Command, path: Path) -> tuple[int, int]:
    """Return the number and total bytes of the frames in a command's log."""
    addresses, command.addresses = command.addresses, None
    assert command("log", "export", "--format", "frames", "--output", path).status == 0
    command.addresses = addresses
    raw, decoder, frames = path.read_bytes(), Decoder(), 0
    for start in range(0, len(raw), 1 << 20):
        decoder.receive(raw[start : start + (1 << 20)])
        while decoder.next_event() is not NEED_BYTES:
            frames += 1
    return frames, len(raw)


# --- a full log


async def import_into_a_full_log(
    source: Path, count: int, *, release: bool
) -> tuple[list[str], publish.Totals, ErrorCode | None]:
    """Import into a full log, which gets space if `release`; return the delivered ids, totals and error."""
    async with Propagator(Settings(log_deltas_max=10)) as p:
        p.internals().partition.log.hold("slow", lambda: 0)
        publish_run = publish._PublishRun(publishers.LocalPublisher(p, "import"), acks=False)
        delivered: list[str] = []
        end_code: ErrorCode | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release_space_later, p, release)
            await p.attach(
                CallbackSink(lambda offset, delta: delivered.append(delta.vector_id)),
                start="earliest",
                required=False,
            )
            try:
                with closing(system.Input([str(source)])) as lines:
                    await publish_run.run(lines)
                await p.wait_visible(count)
            except Refused as refusal:
                end_code = refusal.code
            tasks.cancel_scope.cancel()
        p.internals().partition.log.release("slow")
        return delivered, publish_run.totals, end_code


async def release_space_later(p: Propagator, release: bool) -> None:
    await anyio.sleep(0.15)
    if release:
        p.internals().partition.log.release("slow")


def lines_file(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "in"
    path.write_text("\n".join(create_lines(count)))
    return path


@pytest.mark.parametrize("count", [11, 30])  # only the last line is refused, and no line follows it
def test_lines_wait_for_capacity_and_keep_their_order(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_state, "BATCH_DELTAS_MAX", 3)
    source = lines_file(tmp_path, count)
    delivered, totals, end_code = anyio.run(lambda: import_into_a_full_log(source, count, release=True))
    assert delivered == [f"v{n}" for n in range(count)]
    assert (totals.acknowledged, totals.refused, end_code) == (count, 0, None)


def test_stalled_import_ends_with_log_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(producer_state, "BATCH_DELTAS_MAX", 1)
    source = lines_file(tmp_path, 30)
    delivered, totals, end_code = anyio.run(lambda: import_into_a_full_log(source, 30, release=False))
    assert (len(delivered), totals.acknowledged, totals.refused) == (10, 10, 0)
    assert end_code is ErrorCode.LOG_FULL


# --- real processes


def start_publish(command: Command, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "delta_prop", "publish", "--data", str(command.data), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_killed_and_restarted_import_has_one_effect_per_line(command: Command) -> None:
    """The import is killed twice while lines are in flight, then runs to its end."""
    lines = create_lines(400)
    offset_by_line: dict[int, int] = {}
    for kill_after in (1, 150):
        with start_publish(command, "--producer", "import", "--acks") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("".join(line + "\n" for line in lines[: kill_after + 100]).encode())
            process.stdin.flush()  # standard input stays open, so the import cannot end
            for _ in range(kill_after):
                check_offset(offset_by_line, json.loads(process.stdout.readline()))
            process.kill()
            for line in process.stdout.read().splitlines():
                check_offset(offset_by_line, json.loads(line))
        assert process.returncode < 0
    result = command.publish(lines, "--producer", "import", "--acks")
    assert result.status == 0
    for ack in result.lines[:-1]:
        check_offset(offset_by_line, ack)
    assert offset_by_line == {n + 1: n for n in range(400)}
    shown = command("log", "show", "--json").lines
    assert [row["vector_id"] for row in shown] == [f"v{n}" for n in range(400)]
    assert result.lines[-1]["duplicates"] >= 150
    print(f"{result.lines[-1]['duplicates']} of 400 lines were stored before")


def check_offset(offset_by_line: dict[int, int], ack: dict[str, Any]) -> None:
    assert offset_by_line.setdefault(ack["line"], ack["offset"]) == ack["offset"]


def test_lines_that_trickle_in_are_acked_one_by_one(command: Command) -> None:
    with start_publish(command, "--acks") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for n in range(3):
            process.stdin.write(create_line(f"v{n}").encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["offset"] == n
        process.stdin.write(create_line("last").encode())
        process.stdin.close()
        assert json.loads(process.stdout.readline())["line"] == 4
        assert json.loads(process.stdout.readline())["acknowledged"] == 4
    assert process.returncode == 0


def test_reading_from_a_terminal_prints_a_prompt(command: Command) -> None:
    terminal, process_end = os.openpty()
    arguments = ["publish", "--data", str(command.data)]
    with subprocess.Popen(
        [sys.executable, "-m", "delta_prop", *arguments],
        stdin=process_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(process_end)
        os.write(terminal, create_line("v").encode() + b"\n\x04")
        out, err = process.communicate(timeout=60)
    os.close(terminal)
    assert err == b"delta-prop: reading deltas from standard input; end with Ctrl-D\n"
    assert json.loads(out)["acknowledged"] == 1


def test_closed_standard_output_gives_no_traceback(command: Command) -> None:
    with start_publish(command, "--acks") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(create_line("v").encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write(create_line("v").encode() + b"\n")
        process.stdin.flush()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_disk_too_full_to_open_is_reported_in_one_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.publish(create_lines(2))
    write = LocalFile.write

    def fail_with_full_disk(self: LocalFile, position: int, parts: Sequence[Buffer]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFile, "write", fail_with_full_disk)
    result = command.publish(create_lines(2))
    assert result.status == 1
    assert result.err.startswith("delta-prop: the disk is full: No space left on device")
    assert "free a few MB" in result.err
    assert "Errno" not in result.err
    monkeypatch.setattr(LocalFile, "write", write)
    assert command.publish(create_lines(2)).status == 0
