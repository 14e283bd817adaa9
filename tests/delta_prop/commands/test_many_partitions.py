"""Streams of more partitions than a client can open: commands say so within seconds, and create nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from delta_prop_wire.murmur import partition_of
from tests.delta_prop.commands.server_thread import served_streams
from tests.delta_prop.commands.support import create_line

if TYPE_CHECKING:
    from pathlib import Path

MOST = 65_535
FEW = 6
WAITS = "waiting, no answer for "
WHY = "no connection to 3 of 6 partitions: raise connections_per_host_max of the service, or read one "


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


def test_show_and_clients_of_very_many_partitions_answer_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines"
    lines.write_text(create_line("a") + "\n")
    number = partition_of("default", "a", MOST)
    with served_streams(tmp_path / "facts") as address:
        to, stream = ("--to", address), ("--stream", "m")
        assert run("streams", "create", "m", "--partitions", MOST, *to) == 0
        assert run("publish", lines, *stream, "--partition", number, *to) == 0
        capsys.readouterr()
        began = time.monotonic()
        assert run("streams", "show", "m", "--json", *to) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["ranges"] == [{"partition": number, "start_offset": 0, "next_offset": 1}]
        assert shown["never_used"] == MOST - 1
        assert run("streams", "show", "m", *to) == 0
        assert "never_used" in capsys.readouterr().out
        for command in (
            ("publish", lines, *stream, *to),
            ("subscribe", *stream, "--from", address),
            ("subscribe", *stream, "--no-follow", "--from", address),
        ):
            assert run(*command) == 2
            (line,) = [one for one in capsys.readouterr().err.splitlines() if "partitions" in one]
            assert line.endswith(
                "65535 partitions are too many for one client, which opens up to 1000: name one with "
                "--partition"
            )
        assert time.monotonic() - began < 20
        directory = tmp_path / "facts" / "streams" / "m-1"
        assert {name.split("-")[0] for name in os.listdir(directory)} == {str(number)}
    assert run("publish", lines, *stream, "--data", tmp_path / "facts") == 2
    assert {name.split("-")[0] for name in os.listdir(directory)} == {str(number)}


@pytest.mark.parametrize("follow", [("--count", "3"), ("--no-follow",)])
def test_subscribe_reports_the_partitions_without_a_connection(
    tmp_path: Path, follow: tuple[str, ...]
) -> None:
    data, lines = tmp_path / "facts", tmp_path / "lines"
    names = [
        next(f"v{i}" for i in range(999) if partition_of("default", f"v{i}", FEW) == n) for n in range(FEW)
    ]
    lines.write_text("".join(create_line(name) + "\n" for name in names))
    assert run("streams", "create", "w", "--partitions", FEW, "--data", data) == 0
    assert run("publish", lines, "--stream", "w", "--data", data) == 0
    with served_streams(data, connections_per_host_max=3) as address:
        arguments = ("subscribe", "--stream", "w", "--start", "earliest", *follow, "--from", address)
        process = subprocess.Popen(
            [sys.executable, "-m", "delta_prop", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        timer = threading.Timer(30, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            read = [json.loads(process.stdout.readline())["vector_id"] for _ in range(3)]
            assert len(set(read)) == 3, "those of the partitions that have a connection"
            if "--no-follow" in follow:
                line = process.stderr.readline()
                assert WAITS in line
                assert "RATE_LIMITED" in line
                assert WHY in line
            else:
                assert process.wait(20) == 0
        finally:
            timer.cancel()
            process.kill()
            process.communicate()


def test_lookup_reports_why_it_waits(tmp_path: Path) -> None:
    data = tmp_path / "facts"
    assert run("streams", "create", "w", "--partitions", FEW, "--data", data) == 0
    with served_streams(data, connections_per_host_max=1, handshake_timeout_s=300) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):  # it is accepted before any later one
            waiter = subprocess.Popen(
                [sys.executable, "-m", "delta_prop", "subscribe", "--stream", "w", "--from", address],
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                assert waiter.stderr is not None
                assert "RATE_LIMITED: 1 connections from " in waiter.stderr.readline()
            finally:
                waiter.kill()
                waiter.communicate()
