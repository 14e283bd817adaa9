"""The runbook in docs/operating.md, run as printed: backup, restore, start, rebuild, verify."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import numpy as np
import pytest

from delta_prop.client import Producer
from delta_prop_wire.delta import Delta, create
from tests.net.ports import free_ports
from tests.page_samples import PAGE, mask_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 60.0


class Step(NamedTuple):
    """A command of the page and its printed output."""

    command: str
    printed: list[str]


def steps() -> list[Step]:
    """Return the commands of the runbook in order."""
    section = PAGE.read_text().partition("\n## From backup to serving\n")[2].partition("\n## ")[0]
    steps_found: list[Step] = []
    for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps_found.append(Step(line[2:], []))
            else:
                steps_found[-1].printed.append(line)
    return steps_found


class Machine:
    """A folder in which an operator's commands run, with the server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports()
        self._server: subprocess.Popen[str] | None = None

    def run(self, step: Step) -> list[str]:
        """Run a step to its end, or a server until it is ready; return the printed lines."""
        words = shlex.split(self._with_own_ports(step.command))
        if words[0] == "delta-prop":
            words[:1] = [sys.executable, "-m", "delta_prop"]
        if "serve" in words:
            return self._serve(words)
        result = subprocess.run(
            words, cwd=self.folder, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def expected(self, step: Step) -> list[str]:
        """Return a step's output on the page, with this machine's ports."""
        return [mask_numbers(self._with_own_ports(line)) for line in step.printed]

    @contextmanager
    def server(self) -> Iterator[None]:
        """Stop the started server, if any, when the block ends."""
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the server with SIGTERM."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGTERM)
            try:
                server.communicate(timeout=WAIT_S)
            finally:
                server.kill()

    def _serve(self, words: list[str]) -> list[str]:
        server = subprocess.Popen(
            words,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"DELTA_PROP_LOGGING__LEVEL": "error"},
        )
        self._server = server
        assert server.stdout is not None
        line = server.stdout.readline()
        if line:
            return [line.rstrip("\n")]
        self._server = None
        assert server.stderr is not None
        errors = server.stderr.read()
        server.wait(WAIT_S)
        server.stdout.close()
        server.stderr.close()
        return errors.splitlines()

    def _with_own_ports(self, text: str) -> str:
        return text.replace("7373", str(self.ports[0])).replace("7374", str(self.ports[1]))


async def publish(port: int, first: int, count: int) -> None:
    async with Producer(f"127.0.0.1:{port}", name="orders") as producer:
        await producer.publish(*[Delta(f"v{n}", create([float(n)])) for n in range(first, first + count)])


def stored_vectors(path: Path) -> dict[str, list[float]]:
    """Return the vectors in a storage file."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT vector_id, value FROM vectors").fetchall()
    return {key: np.frombuffer(raw, "<f4").tolist() for key, raw in rows}


def logged_vectors(machine: Machine) -> dict[str, list[float]]:
    """Return the vectors that the fold of the log has."""
    lines = machine.run(Step("delta-prop log export --data facts", []))
    rows = [json.loads(line) for line in lines]
    return {row["vector_id"]: row["vector"] for row in rows}


def configure(machine: Machine, more: str = "") -> None:
    port, http_port = machine.ports
    (machine.folder / "delta-prop.toml").write_text(
        f"data = 'facts'\nserver = {{ port = {port}, http_port = {http_port} }}\n"
        f"[[sinks]]\nkind = 'storage'\npath = 'facts.db'\n{more}"
    )


def lose_all_but_a_backup(machine: Machine) -> list[Step]:
    """Serve, make a backup, publish more and stop; return the steps of the runbook after the backup."""
    port, _ = machine.ports
    backup, *after = steps()
    machine.run(Step("delta-prop serve --config delta-prop.toml", []))
    anyio.run(publish, port, 0, 50)
    assert [mask_numbers(line) for line in machine.run(backup)] == machine.expected(backup)
    anyio.run(publish, port, 50, 5)
    machine.stop()
    assert len(stored_vectors(machine.folder / "facts.db")) == 55, (
        "the storage file was not outside the data directory"
    )
    return after


def run_until_rebuilt(machine: Machine, step: Step) -> list[str]:
    printed = machine.run(step)
    while "rebuilding" in "".join(printed):
        printed = machine.run(step)
    return printed


EXPECTED = {f"v{n}": [float(n)] for n in range(50)}


def test_runbook_leads_from_a_backup_to_serving(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    configure(machine)
    with machine.server():
        for step in lose_all_but_a_backup(machine):
            is_sinks_step = "sinks --http" in step.command
            printed = run_until_rebuilt(machine, step) if is_sinks_step else machine.run(step)
            assert [mask_numbers(line) for line in printed] == machine.expected(step), step.command
    assert logged_vectors(machine) == EXPECTED
    assert stored_vectors(tmp_path / "facts.db") == EXPECTED


def test_runbook_works_for_all_kinds_of_sinks_at_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    configure(
        machine,
        "[[sinks]]\nkind = 'index'\nvectors = 'storage'\n[[sinks]]\nkind = 'cache'\n"
        "[[sinks]]\nkind = 'jsonlines'\npath = 'lines'\n",
    )
    with machine.server():
        for step in lose_all_but_a_backup(machine):
            printed = (
                run_until_rebuilt(machine, step) if "sinks --http" in step.command else machine.run(step)
            )
            if "is ahead" in "".join(printed):
                assert printed[0].endswith(
                    f"if this is the right directory, move {tmp_path / 'lines'} away, as sink 'jsonlines' "
                    "cannot be rebuilt but can start empty, then start with `delta-prop serve --config "
                    "delta-prop.toml --rebuild storage`, which replaces their data from the log"
                )
                (tmp_path / "lines").rename(tmp_path / "lines.lost")
            elif "sinks --http" in step.command:
                names = ("storage", "index", "cache", "jsonlines")
                assert [line.split()[:4] for line in printed[1:]] == [[n, "idle", "50", "0"] for n in names]
    assert logged_vectors(machine) == EXPECTED
    assert stored_vectors(tmp_path / "facts.db") == EXPECTED
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert {row["vector_id"] for row in lines} == set(EXPECTED)
    assert len(lines) == 50


def test_no_sink_is_rebuilt_while_another_cannot_start(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    configure(machine, "[[sinks]]\nkind = 'jsonlines'\npath = 'lines'\n")
    with machine.server():
        for step in lose_all_but_a_backup(machine)[:3]:
            machine.run(step)
        errors = machine.run(Step("delta-prop serve --config delta-prop.toml --rebuild storage", []))
    assert len(errors) == 1
    assert errors[0].endswith(
        f"if this is the right directory, move {tmp_path / 'lines'} away, as sink 'jsonlines' cannot be "
        "rebuilt but can start empty, then start with `delta-prop serve --config delta-prop.toml --rebuild "
        "storage`"
    )
    assert len(stored_vectors(tmp_path / "facts.db")) == 55, "the storage file was changed"


@pytest.mark.parametrize("sink", ["storage", "jsonlines"])
def test_empty_log_refuses_a_sink_with_data_of_another_log(tmp_path: Path, sink: str) -> None:
    machine = Machine(tmp_path)
    port, http_port = machine.ports
    (tmp_path / "delta-prop.toml").write_text(
        f"server = {{ port = {port}, http_port = {http_port} }}\n[[sinks]]\nkind = '{sink}'\npath = 'held'\n"
    )
    with machine.server():
        machine.run(Step("delta-prop serve --config delta-prop.toml --data facts", []))
        anyio.run(publish, port, 0, 5)
        machine.stop()
        contents = (tmp_path / "held").read_bytes()
        errors = machine.run(Step("delta-prop serve --config delta-prop.toml --data fcats", []))
        assert "holds data of another log (" in errors[0]
        assert "which is empty: nothing was rebuilt; if this is the right directory, " in errors[0]
        assert (tmp_path / "held").read_bytes() == contents
        assert not (tmp_path / "fcats").exists()
        if sink == "storage":
            command = "delta-prop serve --config delta-prop.toml --data fcats --rebuild storage"
            assert f"start with `{command}`, which replaces" in errors[0]
            assert machine.run(Step(command, [])) == [f"ready port={port} http={http_port}"]
