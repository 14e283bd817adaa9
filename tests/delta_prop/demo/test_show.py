"""The whole demo on a small folder: what it shows, what it returns, what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.demo.show import INTERRUPTED, Options, show
from delta_prop.demo.wiring import SINKS
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S_MAX = 30

DOORS = '''"""Doors of a house, and what they can do for whoever comes and goes."""


def open_door(key):
    """Open a door with its key, gently."""


def close_door():
    """Close the door again.

    Nobody should be standing in it.
    """
'''
NOTES = """# Garden

Roses want sun in the morning, and water in the evening of a warm day.

Tomatoes want a roof above them, since rain on their leaves makes them ill.

# Kitchen

A sharp knife is safer than a blunt one, because it goes where it is told to go.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own texts; temporary folders are made beside them."""
    own, temporary = tmp_path / "own", tmp_path / "temporary"
    own.mkdir()
    temporary.mkdir()
    (own / "doors.py").write_text(DOORS)
    (own / "notes.md").write_text(NOTES)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    return own


def play(**options: object) -> tuple[int, str]:
    """Run the demo in this process; its status and what it wrote."""
    written: list[str] = []

    async def main() -> int:
        return await show(Options(**options), written.append)  # type: ignore[arg-type]

    return anyio.run(main), "".join(written)


def test_all_scenes_are_played_and_every_sink_is_identical(folder: Path) -> None:
    status, text = play(path=str(folder), once=True, json=True)
    assert status == 0
    assert [line[0] for line in text.splitlines() if re.match(r"\d ", line)] == list("1234567")
    assert len(re.findall(r"verify \w+ +\d+ (?:rows|deltas) +identical", text)) == 6
    assert re.search(r"subscriber: sparse \S+  8 dims  64 B  visible in index after [\d.]+ ms", text)
    facts = json.loads(text.splitlines()[-1])
    assert (facts["documents"], facts["files"]) == (6, 2)
    assert facts["verify"] == dict.fromkeys(SINKS, "identical")
    deltas = {name: one["deltas"] for name, one in facts["sinks"].items()}
    assert deltas.pop("audit") == facts["deltas"] - 7
    assert deltas.pop("replica") == facts["deltas"] - facts["crash"]["durable"]
    assert deltas == dict.fromkeys(("storage", "index", "cache", "subscriber"), facts["deltas"])
    assert facts["edit"]["bytes"] == 64
    assert facts["edit"]["found_first"]


@pytest.mark.parametrize("sink", SINKS)
def test_a_planted_row_is_found_in_its_sink_and_named(folder: Path, sink: str) -> None:
    status, text = play(path=str(folder), once=True, spoil=sink)
    assert status == 1
    verdicts = dict(re.findall(r"verify (\w+) +\d+ (?:rows|deltas) +(.*)", text))
    assert [name for name, verdict in verdicts.items() if verdict != "identical"] == [sink]
    assert re.search(r"\d WRONG  .*docs/", verdicts[sink])


def test_the_users_folder_is_not_written_and_the_temporary_one_is_gone(folder: Path) -> None:
    before = {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    play(path=str(folder), once=True)
    assert {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert list((folder.parent / "temporary").iterdir()) == []


def test_the_temporary_folder_is_kept_on_request(folder: Path) -> None:
    _, text = play(path=str(folder), once=True, keep=True)
    (kept,) = (folder.parent / "temporary").iterdir()
    assert text.endswith(f"kept: {kept.resolve()}\n")
    assert len((kept / "published.jsonl").read_text().splitlines()) > 7
    assert "lottery raffle" in next((kept / "texts").iterdir()).read_text()


def test_a_folder_that_is_not_there_or_has_no_text_is_told(folder: Path) -> None:
    with pytest.raises(UsageError, match="no folder of that name"):
        play(path=str(folder / "nowhere"), once=True)
    (folder / "doors.py").unlink()
    (folder / "notes.md").unlink()
    with pytest.raises(UsageError, match="has no text to index"):
        play(path=str(folder), once=True)
    assert list((folder.parent / "temporary").iterdir()) == []


class Terminal(AbstractContextManager["Terminal"]):
    """A demo in a terminal of its own, and what it has shown so far."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, inside = pty.openpty()
        command = [sys.executable, "-m", "delta_prop", "demo", *arguments]
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment)
        os.close(inside)
        self.shown = ""

    def __exit__(self, *_: object) -> None:
        os.close(self._terminal)
        self.process.kill()
        self.process.wait()

    def wait_for(self, pattern: str) -> str:
        """Read on until something has been shown; what was shown up to there."""
        while (found := re.search(pattern, self.shown)) is None:
            assert self._read(), f"it ended without {pattern!r}: {self.shown}"
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text: str) -> None:
        """What somebody types."""
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Read to the end; its exit status."""
        while self._read():
            pass
        return self.process.wait(WAIT_S_MAX)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], WAIT_S_MAX)
        assert ready, f"nothing came for {WAIT_S_MAX} s: {self.shown}"
        chunk = b""
        with suppress(OSError):  # Linux tells the end of the other side so
            chunk = os.read(self._terminal, 65536)
        self.shown += chunk.decode()
        return bool(chunk)


def test_by_hand_one_searches_and_edits_until_an_empty_line(folder: Path) -> None:
    with Terminal("--path", str(folder)) as terminal:
        terminal.wait_for("search> ")
        terminal.type("tomatoes in the rain\n")
        assert "notes.md:garden.2" in terminal.wait_for("Tomatoes want")
        (folder / "doors.py").write_text(DOORS.replace("gently", "gently, like a giraffe"))
        terminal.wait_for(r"subscriber: sparse doors:open_door  \d+ dims")
        (folder / "new.md").write_text("A paragraph about zebras, which have stripes and run in herds.\n")
        terminal.wait_for(r"subscriber: create new\.md:1  1,024 dims")
        (folder / "notes.md").unlink()
        terminal.wait_for(r"subscriber: delete notes\.md:kitchen\.1")
        (folder / "doors.py").write_text("def (")
        terminal.wait_for("its documents stay as they were")
        terminal.type("\n")
        assert len(re.findall("identical", terminal.wait_for("next:"))) == 6
        assert terminal.end() == 0


def test_ctrl_c_while_watching_ends_with_the_check(folder: Path) -> None:
    with Terminal("--path", str(folder)) as terminal:
        terminal.wait_for("search> ")
        terminal.process.send_signal(signal.SIGINT)
        assert len(re.findall("identical", terminal.wait_for("next:"))) == 6
        assert terminal.end() == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_before_that_ends_at_once_and_leaves_nothing(folder: Path, how: signal.Signals) -> None:
    with Terminal() as terminal:
        terminal.wait_for("1 index")
        terminal.process.send_signal(how)
        terminal.wait_for("interrupted")
        assert terminal.end() == INTERRUPTED
    assert list((folder.parent / "temporary").iterdir()) == []
