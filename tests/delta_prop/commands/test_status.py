"""`get` shows a vector's present and past states; `status` and `sinks` show the log and its readers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop_sinks import CallbackSink
from tests.delta_prop.commands.support import create_line, create_lines
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.support import Command

HISTORY_LINES = [
    create_line("a", 1.0, 2.0, metadata={"k": 1}),
    json.dumps({"vector_id": "a", "op": "scale", "factor": 3}),
    create_line("other", 1.0, 1.0),
    json.dumps({"vector_id": "a", "op": "metadata", "metadata": {"l": 2}}),
    json.dumps({"vector_id": "a", "op": "delete"}),
    json.dumps({"vector_id": "docs:a", "op": "opaque", "data": "AAEC"}),
]


def test_get_returns_a_vector_now_and_at_each_offset(command: Command) -> None:
    command.publish(HISTORY_LINES)
    expected = {
        0: ([1.0, 2.0], {"k": 1}, 1, 0),
        1: ([3.0, 6.0], {"k": 1}, 2, 1),
        2: ([3.0, 6.0], {"k": 1}, 2, 1),
        3: ([3.0, 6.0], {"k": 1, "l": 2}, 3, 3),
    }
    for offset, (vector, metadata, deltas, last) in expected.items():
        result = command("get", "a", "--at", offset)
        assert result.status == 0
        assert result.lines == [
            {
                "vector_id": "a",
                "namespace": "default",
                "vector": vector,
                "metadata": metadata,
                "alive": True,
                "deltas": deltas,
                "last_offset": last,
            }
        ]
    deleted = command("get", "a")
    assert (deleted.status, deleted.lines[0]["alive"], deleted.lines[0]["deltas"]) == (1, False, 4)
    assert command("get", "a", "--at", "2020-01-01").lines[0]["deltas"] == 0
    assert command("get", "a", "--at", "now").lines == deleted.lines
    assert command("get", "docs:a").lines[0]["data"] == "AAEC"
    assert command("get", "docs:a", "--namespace", "docs").status == 0
    assert command("get", "docs:a", "--namespace", "default").status == 1
    assert command("get", "a", "--at", "never").status == 2


def test_status_reports_the_state_of_a_directory(command: Command) -> None:
    command.publish(create_lines(3))
    status = command("status", "--json").lines[0]
    assert {name: status[name] for name in ("health", "writer", "epoch", "closed", "sinks")} == {
        "health": "intact",
        "writer": None,
        "epoch": 1,
        "closed": True,
        "sinks": 0,
    }
    assert (status["start_offset"], status["next_offset"], status["segments"]) == (0, 3, 1)
    assert status["bytes"] == command.segment().stat().st_size
    assert status["bytes_until_full"] == max(status["bytes_free"] - 64 * 2**20, 0)
    shown = dict(line.split(maxsplit=1) for line in command("status").out.splitlines())
    assert shown["next_offset"] == "3"
    assert shown["writer"] == "none"


def test_sink_is_listed_and_forgotten(command: Command) -> None:
    command.publish(create_lines(3))

    async def attach() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(CallbackSink(lambda offset, delta: None, name="audit"), start="earliest")
            await p.wait_visible(3)

    anyio.run(attach)
    command.publish(create_lines(2))
    (row,) = command("sinks", "--json").lines
    assert 0 < row.pop("lag_s") < 60
    assert [row] == [
        {
            "name": "audit",
            "kind": "sink",
            "offset": 3,
            "required": True,
            "rebuilding": False,
            "paused": False,
            "quarantined": 0,
            "lag": 2,
            "stream": "default",
            "partition": 0,
        }
    ]
    name, kind, offset, lag, lag_s, *rest = command("sinks").out.splitlines()[1].split()
    assert [name, kind, offset, lag, *rest] == ["audit", "sink", "3", "2", "s", "0", "yes"]
    assert 0 <= int(lag_s) < 60
    lags = command("status", "--json").lines[0]["lags"]
    assert lags["audit"]["deltas"] == 2
    assert 0 < lags["audit"]["seconds"] < 60
    shown = dict(line.split(maxsplit=1) for line in command("status").out.splitlines())
    assert shown["lags.audit.deltas"] == "2"
    assert float(shown["lags.audit.seconds"]) > 0
    result = command("sinks", "forget", "audit")
    assert (result.status, result.out) == (0, "done: sink 'audit' is forgotten; its quarantine was empty\n")
    assert command("sinks", "--json").lines == []
    result = command("sinks", "forget", "audit")
    assert result.status == 2
    assert "'audit': there is no such sink or group" in result.err


def test_corrupted_group_cursor_hides_no_other_row(command: Command) -> None:
    command.publish(create_lines(3))
    for name in ("good", "spoilt"):
        assert command("subscribe", "--group", name, "--no-follow").status == 0
    cursor = command.data / "groups" / "spoilt.cursor"
    cursor.write_bytes(cursor.read_bytes()[:-1] + b"?")
    result = command("sinks", "--json")
    assert result.status == 1
    good, corrupted = result.lines
    assert (good["name"], good["offset"], good["lag"], "corruption" in good) == ("good", 3, 0, False)
    assert (corrupted["name"], corrupted["offset"], corrupted["lag"]) == ("spoilt", None, None)
    assert (
        "groups/spoilt.cursor) is corrupted: remove it with `delta-prop sinks forget spoilt`"
        in corrupted["corruption"]
    )
    result = command("sinks")
    assert result.status == 1
    rows = result.out.splitlines()[1:]
    assert rows[0].split()[:4] == ["good", "group", "3", "0"]
    assert rows[1].split()[:4] == ["spoilt", "group", "?", "?"]
    assert "corrupted" in rows[1]
    result = command("status", "--json")
    status = result.lines[0]
    assert (result.status, status["health"], status["next_offset"], status["sinks"]) == (1, "corrupted", 3, 2)
    assert "spoilt" in status["corruption"]
    result = command("sinks", "forget", "spoilt")
    assert (result.status, result.out) == (0, "done: group 'spoilt' is forgotten\n")
    assert command("status").status == command("sinks").status == 0


def test_corrupted_cursors_are_reported_and_serve_warns(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(3))
    assert command("log", "verify").err == ""
    (command.data / "cursors").write_bytes(b"garbage\n")
    expected = "its 8 bytes do not fit their checksum, so it is not used: sinks without a cursor of their own"
    status = command("status", "--json")
    assert (status.status, status.lines[0]["health"], status.lines[0]["next_offset"]) == (1, "corrupted", 3)
    assert expected in status.lines[0]["corruption"]
    for arguments in (["sinks"], ["sinks", "--json"], ["log", "verify"]):
        result = command(*arguments)
        assert (result.status, expected in result.err) == (1, True), (arguments, result)
        assert "a copy of the file from a backup" in result.err
    assert command("log", "verify", "--json").lines[0]["first_corruption"]["file"] == "cursors"
    with served(command.data, errors=tmp_path / "errors"):
        pass
    (line,) = [line for line in (tmp_path / "errors").read_text().splitlines() if expected in line]
    assert json.loads(line)["level"] == "warning"
    (command.data / "cursors").unlink()
    assert command("log", "verify").status == command("sinks").status == command("status").status == 0


def test_get_beyond_the_end_returns_the_present_with_a_note(command: Command) -> None:
    command.publish(HISTORY_LINES)
    present = command("get", "docs:a")
    assert command("get", "docs:a", "--at", 5).err == present.err == ""  # the last offset of the log
    result = command("get", "docs:a", "--at", 6)
    assert (result.status, result.lines) == (0, present.lines)
    assert result.err == "delta-prop: --at 6: the log ends before offset 6: this is the present state\n"
