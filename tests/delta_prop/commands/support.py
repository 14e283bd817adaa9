"""Helpers that run verbs of the command in this process and read their output."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.cli import main
from tests.open_files import open_below

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.server_thread import ServerAddresses


OPTION_OF_REMOTE_VERB = {"publish": "--to", "subscribe": "--from"}


@dataclass
class VerbResult:
    """Exit status and output of a verb."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """Runs verbs on one data directory, or, if `addresses` is set, on the server that has it."""

    addresses: ServerAddresses | None = None

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.data = tmp_path / "facts"
        self.input = tmp_path / "in.jsonl"
        self.capsys = capsys

    def __call__(self, *arguments: object) -> VerbResult:
        self.capsys.readouterr()
        location = ["--data", str(self.data)]
        if self.addresses is not None and arguments[0] in OPTION_OF_REMOTE_VERB:
            location = [OPTION_OF_REMOTE_VERB[str(arguments[0])], self.addresses.protocol_address]
        folder = self.input.parent
        before = open_below(folder)
        status = main([*map(str, arguments), *location])
        # Other threads, such as a server's, may open files meanwhile.
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and not any(thread.name == "server" for thread in threading.enumerate()):
            assert len(open_below(folder)) <= len(before), "the verb has not closed its files"
        captured = self.capsys.readouterr()
        return VerbResult(status, captured.out, captured.err)

    def publish(self, lines: list[str], *arguments: str) -> VerbResult:
        self.input.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return self("publish", self.input, *arguments)

    def segment(self) -> Path:
        """Return the only segment file."""
        (path,) = self.data.glob("streams/default/0/*.log")
        return path


def create_line(key: str, *values: float, **fields: Any) -> str:
    return json.dumps({"vector_id": key, "op": "create", "vector": list(values) or [1.0], **fields})


def create_lines(count: int) -> list[str]:
    return [create_line(f"v{n}", float(n)) for n in range(count)]
