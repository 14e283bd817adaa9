"""Recorded traffic in a scenario: deltas that a real server received are offered at the recorded times."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from delta_prop.cli import main
from delta_prop.directory.recorded_traffic import SALT_BYTES, TrafficWriter
from delta_prop_wire.delta import Delta, Source, opaque
from delta_prop_wire.encode import encode_batch
from tests.delta_prop.commands.server_thread import served
from tests.delta_prop.commands.support import Command, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def recording(*times_s: float, rows: int = 10) -> bytes:
    writer = TrafficWriter(bytes(SALT_BYTES))
    parts = [writer.begin(0)]
    for number, time_s in enumerate(times_s):
        deltas = [Delta(f"v{row}", opaque(b"content")) for row in range(rows)]
        batch = encode_batch(deltas, origin=1, base=number * rows + 1)
        parts.append(writer.add(batch, round(time_s * 1e6), Source.LOCAL))
    return b"".join([*parts, writer.end(0)])


def test_recorded_server_traffic_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(tmp_path, capsys)
    with served(command.data) as command.addresses:
        command.publish(create_lines(120))
        range_options = [
            "--from",
            command.addresses.protocol_address,
            "--start",
            "earliest",
            "--until",
            "latest",
        ]
        assert main(["trace", "record", *range_options, "--to", str(tmp_path / "real.trace")]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    arguments = ["--trace", "real.trace", "--duration", "1s", "--only", "half the speed", "--json"]
    assert main(["simulate", "what_if", *arguments]) == 0
    (result,) = json.loads(capsys.readouterr().out)["alternatives"]
    assert result["totals"]["offered"] == result["totals"]["acknowledged"] == 120
    assert {sink["applied"] for sink in result["sinks"]} == {120}


def test_replay_follows_speed_and_warns_of_truncation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(
        """name = "replay"
duration = "3s"
[[source]]
name = "web"
pattern = "replay"
trace = "a.trace"
[[sink]]
name = "index"
[[alternative]]
name = "twice as fast"
set = {"source.web.speed" = 2.0}
"""
    )
    (tmp_path / "a.trace").write_bytes(recording(0, 1, 2, 4, 5, 7)[:-1])
    assert main(["simulate", str(tmp_path / "a.toml"), "--json"]) == 0
    shown = capsys.readouterr()
    once, twice = json.loads(shown.out)["alternatives"]
    assert (once["totals"]["offered"], twice["totals"]["offered"]) == (30, 50)
    assert shown.err.count("truncated") == 0  # the run ended before the truncation
    assert main(["simulate", str(tmp_path / "a.toml"), "--duration", "9s"]) == 0
    assert "truncated" in capsys.readouterr().err
