"""The complete demo on a small folder: its output, its exit status, and the files that it leaves."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.demo import fault_scenes, system, verify, wiring
from delta_prop.demo.reference_fold import ReferenceFold
from delta_prop.demo.runner import INTERRUPTED, Options, run_demo
from delta_prop.demo.system import Workspace
from delta_prop.demo.wiring import SINKS
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from delta_prop_sinks.sink import Delivery

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
    """The user's own texts; the demo creates its temporary folders next to them."""
    own, temporary = tmp_path / "own", tmp_path / "temporary"
    own.mkdir()
    temporary.mkdir()
    (own / "doors.py").write_text(DOORS)
    (own / "notes.md").write_text(NOTES)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(fault_scenes, "EDIT_INTERVAL_S", 0.0005)
    monkeypatch.setattr(fault_scenes, "BATCH_PAUSE_S", 0.005)
    monkeypatch.setenv("TMPDIR", str(temporary))
    return own


def run_scenes(**options: object) -> tuple[int, str]:
    """Run the demo in this process; return its exit status and its output."""
    output = io.StringIO()

    async def main() -> int:
        return await run_demo(Options(**options), output)  # type: ignore[arg-type]

    return anyio.run(main), output.getvalue()


def test_all_scenes_run_and_every_sink_is_identical(folder: Path) -> None:
    status, text = run_scenes(path=str(folder), once=True, json=True)
    assert status == 0
    assert [line[0] for line in text.splitlines() if re.match(r"\d ", line)] == list("1234567")
    assert len(re.findall(r"verify \w+ +\d+ (?:rows|deltas) +identical", text)) == 6
    assert re.search(r"subscriber: sparse \S+  8 dims  64 B  visible in index after [\d.]+ ms", text)
    summary = json.loads(text.splitlines()[-1])
    assert (summary["documents"], summary["files"]) == (6, 2)
    assert summary["verify"] == dict.fromkeys(SINKS, "identical")
    deltas = {name: sink["deltas"] for name, sink in summary["sinks"].items()}
    assert deltas.pop("audit") == summary["deltas"] - 7  # those before it was attached
    assert deltas.pop("replica") == summary["deltas"] - summary["crash"]["resume_offset"]
    assert deltas == dict.fromkeys(("storage", "index", "cache", "subscriber"), summary["deltas"])
    assert summary["edit"]["bytes"] == 64
    assert summary["edit"]["found_first"]


@pytest.mark.parametrize("sink", SINKS)
def test_corrupted_row_is_reported_by_its_name(folder: Path, sink: str) -> None:
    status, text = run_scenes(path=str(folder), once=True, corrupt=sink)
    assert status == 1
    verdicts = dict(re.findall(r"verify (\w+) +\d+ (?:rows|deltas) +(.*)", text))
    assert [name for name, verdict in verdicts.items() if verdict != "identical"] == [sink]
    assert re.search(r"\d WRONG  .*docs/", verdicts[sink])


def test_users_folder_is_unchanged_and_temporary_one_removed(folder: Path) -> None:
    before = {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    run_scenes(path=str(folder), once=True)
    assert {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert list((folder.parent / "temporary").iterdir()) == []


def test_temporary_folder_stays_on_request(folder: Path) -> None:
    _, text = run_scenes(path=str(folder), once=True, keep=True)
    (temporary,) = (folder.parent / "temporary").iterdir()
    assert text.endswith(f"kept: {temporary.resolve()}\n")
    assert len((temporary / "published.jsonl").read_text().splitlines()) > 7
    assert "lottery raffle" in next((temporary / "texts").iterdir()).read_text()


def test_missing_or_empty_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="no folder of that name"):
        run_scenes(path=str(folder / "nowhere"), once=True)
    (folder / "doors.py").unlink()
    (folder / "notes.md").unlink()
    with pytest.raises(UsageError, match="has no text to index"):
        run_scenes(path=str(folder), once=True)
    assert list((folder.parent / "temporary").iterdir()) == []


def test_only_the_slowed_sink_lags_and_reads_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "MAILBOX_DELTAS_MAX", 32)
    monkeypatch.setattr(fault_scenes, "EDIT_INTERVAL_S", 0.0025)
    names = ("badger", "otter", "heron", "toad", "hornet", "weevil", "marten", "plover", "viper", "carp")
    texts = (f"# {animal}\n\nWhere the {animal} sleeps, what it eats, and who eats it.\n" for animal in names)
    (folder / "animals.md").write_text("\n".join(texts) * 2)
    status, text = run_scenes(path=str(folder), once=True, json=True)
    assert status == 0
    slow = json.loads(text.splitlines()[-1])["slow"]
    assert slow["edits"] > 80
    assert slow["mailbox_overflowed"]
    assert slow["lag"] > slow["mailbox_deltas_max"] >= slow["mailbox_deltas"]
    rows = slow["sinks"]
    audit = rows.pop("audit")
    assert audit["lag_max"] > 2 * max(row["lag_max"] for row in rows.values())
    assert audit["p50_slowed_ms"] > audit["p50_ms"]  # the factor depends on the machine's load
    assert audit["p50_slowed_ms"] > 3 * max(row["p50_slowed_ms"] for row in rows.values())
    assert re.search(r"^  audit +\d+ +[\d.]+ +[\d.,]+ +[\d.]+ +[\d.,]+$", text, re.MULTILINE)


def test_crash_scene_counts_redelivered_and_new_deltas(folder: Path) -> None:
    _, text = run_scenes(path=str(folder), once=True, json=True)
    summary = json.loads(text.splitlines()[-1])
    crash = summary["crash"]
    assert crash["resume_offset"] < crash["applied_end"] < summary["deltas"]
    assert crash["redelivered_deltas"] == crash["applied_end"] - crash["resume_offset"]
    assert crash["new_deltas"] == summary["deltas"] - crash["applied_end"]


def test_delta_lost_by_the_slow_sink_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_apply = JsonLinesSink.apply
    calls = 0

    async def apply_losing_one(sink: JsonLinesSink, deliveries: Sequence[Delivery]) -> None:
        nonlocal calls
        calls += 1
        await original_apply(sink, deliveries if calls != 3 else deliveries[1:] or [])

    monkeypatch.setattr(JsonLinesSink, "apply", apply_losing_one)
    assert wrong_sinks(folder) == ["audit"]


@pytest.mark.parametrize(
    "corruption",
    [
        "UPDATE cursor SET next_offset = next_offset + 1",  # the store lost one delta
        "UPDATE vectors SET lamport = 0, counter = 0, offset = -1; "
        "UPDATE cursor SET next_offset = 7",  # the deltas after the creates are applied twice
        "DELETE FROM vectors WHERE vector_id LIKE 'doors%'",
    ],
)
def test_wrongly_restored_store_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, corruption: str
) -> None:
    original_copy = Workspace.copy_replica

    def copy_corrupted(workspace: Workspace) -> None:
        original_copy(workspace)
        with closing(sqlite3.connect(workspace.crashed_replica)) as connection:
            connection.executescript(corruption)

    monkeypatch.setattr(Workspace, "copy_replica", copy_corrupted)
    assert wrong_sinks(folder) == ["replica"]


@pytest.mark.parametrize("text_part", ["from now on", "5 crash", "third", "6 verify"])
def test_interrupt_in_any_scene_ends_cleanly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text_part: str
) -> None:
    status, text = run_interrupted(
        folder, monkeypatch, lambda text, interrupt: interrupt.set() if text_part in text else None
    )
    assert status == INTERRUPTED
    assert text.endswith("interrupted\n")
    assert "next:" not in text
    assert list((folder.parent / "temporary").iterdir()) == []


def test_interrupt_ends_the_verification_between_two_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded: list[str] = []
    original_add = ReferenceFold.add

    def add(self: ReferenceFold, line: str) -> None:
        folded.append(line)
        original_add(self, line)
        set_interrupt()

    set_interrupt: Callable[[], None] = list  # has no effect, until the demo has started

    def start(_: str, interrupt: anyio.Event) -> None:
        nonlocal set_interrupt
        set_interrupt = interrupt.set

    monkeypatch.setattr(ReferenceFold, "add", add)
    monkeypatch.setattr(verify, "LINES_PER_YIELD", 1)
    assert run_interrupted(folder, monkeypatch, start)[0] == INTERRUPTED
    assert 1 <= len(folded) < 10


def test_skipped_texts_are_reported(folder: Path) -> None:
    (folder / "large.md").write_bytes(b"x" * (system.FILE_BYTES_MAX + 1))
    (folder / "short.md").write_text("# Head\n\nshort\n\nshorter\n")
    (folder / "bytes.md").write_bytes(b"\xff")
    _, text = run_scenes(path=str(folder), once=True)
    assert "  1 file left out: above 1.0 MB\n" in text
    assert "  1 file left out: not UTF-8" in text
    assert "  1 file left out: no description, no paragraph of 40 characters\n" in text
    assert "  2 paragraphs left out: shorter than 40 characters\n" in text


def test_full_disk_is_reported_before_and_during_the_demo(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Workspace, "open_published", raise_disk_full)
    with pytest.raises(UsageError, match=r"not enough .*No space left.*TMPDIR=DIR"):
        run_scenes(path=str(folder), once=True)
    monkeypatch.setattr(Workspace, "free_bytes", 2_000_000)
    with pytest.raises(UsageError, match=r"2.0 MB free, but this demo needs about 2.2 MB.*TMPDIR=DIR"):
        run_scenes(path=str(folder), once=True)
    monkeypatch.setattr(system, "create_workspace", raise_disk_full)
    with pytest.raises(UsageError, match=r"temporary folder: it cannot be created.*TMPDIR=DIR"):
        run_scenes(path=str(folder), once=True)


def run_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_text: Callable[[str, anyio.Event], None]
) -> tuple[int, str]:
    """Run the demo; `on_text` sees its output and interrupts the demo by setting the event."""

    async def main() -> tuple[int, str]:
        interrupt = anyio.Event()

        async def receive_signals() -> AsyncIterator[signal.Signals]:
            await interrupt.wait()
            yield signal.SIGINT
            await anyio.sleep_forever()

        @contextmanager
        def interrupts() -> Iterator[AsyncIterator[signal.Signals]]:
            yield receive_signals()

        class WatchedOutput(io.StringIO):
            def write(self, text: str) -> int:
                count = super().write(text)
                on_text(text, interrupt)
                return count

        output = WatchedOutput()
        monkeypatch.setattr(system, "receive_interrupts", interrupts)
        return await run_demo(Options(path=str(folder), once=True), output), output.getvalue()

    return anyio.run(main)


def wrong_sinks(folder: Path) -> list[str]:
    """Run the demo with a fault; return the sinks that the verification reports as wrong."""
    status, text = run_scenes(path=str(folder), once=True, json=True)
    assert status == 1
    verdicts = json.loads(text.splitlines()[-1])["verify"]
    return [name for name, verdict in verdicts.items() if verdict != "identical"]


class Terminal(AbstractContextManager["Terminal"]):
    """A demo in a pseudo-terminal, and its output so far."""

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
        """Read until the pattern is shown; return the output up to its end."""
        while (found := re.search(pattern, self.shown)) is None:
            assert self._read(), f"the demo ended without {pattern!r}: {self.shown}"
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text: str) -> None:
        """Send keystrokes."""
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Read to the end; return the exit status."""
        while self._read():
            pass
        return self.process.wait(WAIT_S_MAX)

    def _read(self) -> bool:
        poll = select.poll()  # `select.select` accepts no file descriptor above 1,023
        poll.register(self._terminal, select.POLLIN)
        assert poll.poll(WAIT_S_MAX * 1000), f"no output for {WAIT_S_MAX} s: {self.shown}"
        chunk = b""
        with suppress(OSError):  # Linux reports the closed other side as an error
            chunk = os.read(self._terminal, 65536)
        self.shown += chunk.decode()
        return bool(chunk)


def test_interactive_search_and_edits_until_an_empty_line(folder: Path) -> None:
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


def test_ctrl_c_while_watching_runs_the_verification(folder: Path) -> None:
    with Terminal("--path", str(folder)) as terminal:
        terminal.wait_for("search> ")
        terminal.process.send_signal(signal.SIGINT)
        assert len(re.findall("identical", terminal.wait_for("next:"))) == 6
        assert terminal.end() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_early_interrupt_ends_at_once_and_leaves_nothing(folder: Path, signal_number: signal.Signals) -> None:
    with Terminal() as terminal:
        terminal.wait_for("1 index")
        terminal.process.send_signal(signal_number)
        terminal.wait_for("interrupted")
        assert terminal.end() == INTERRUPTED
    assert list((folder.parent / "temporary").iterdir()) == []
