"""The samples of the documentation equal the program's output, and the commands that it names exist.

Each block of commands runs from its first line to its last in a folder with the files that it uses; the
output is compared with the page, except for numbers.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

import delta_prop
from delta_prop import Propagator
from delta_prop.cli import main, make_parser
from delta_prop.client import Producer, Subscriber, facts
from delta_prop.sinks import CallbackSink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused
from tests.delta_prop.commands.server_thread import served
from tests.delta_prop.platform.networks import files
from tests.delta_prop.server.jobs import stage
from tests.delta_prop.server.tokens import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.delta_prop.commands.server_thread import ServerAddresses

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))} | {
    "README.md": (ROOT / "README.md").read_text()
}
FAILING_COMMANDS = {"delta-prop serve --data facts": 1}  # the sample shows that an earlier format is refused


def blocks(page: str) -> list[list[str]]:
    """Return the blocks of commands of a page, as lines."""
    return [text.splitlines() for text in re.findall(r"```console\n(.*?)```", PAGES[page], re.DOTALL)]


TESTED_ELSEWHERE = {
    "$ delta-prop audit --data facts --storage vectors.db": "tests/delta_prop/commands/test_audit.py",
    "$ curl -s localhost:7374/readyz": "tests/delta_prop/durable/test_full.py",
    "$ delta-prop publish changes.jsonl --to localhost:7373": "tests/delta_prop/commands/test_no_progress.py",
    "$ delta-prop groups list --http localhost:7374": "tests/delta_prop/commands/test_groups.py",
    "$ delta-prop log export --data facts --to backup": "tests/delta_prop/commands/test_runbook.py",
    "$ mv facts facts.lost": "tests/delta_prop/commands/test_runbook.py",
    "$ delta-prop serve --config delta-prop.toml": "tests/delta_prop/commands/test_runbook.py",
    "$ delta-prop streams erase people --vector ada --yes --to localhost:7373": (
        "tests/delta_prop/commands/test_streams.py"
    ),
    "$ delta-prop sinks --http localhost:7374": "tests/delta_prop/commands/test_runbook.py",
    "$ delta-prop sinks rebuild storage --data facts": "tests/delta_prop/commands/test_runbook.py",
}
"""Blocks, by first line, that need more than a folder, such as a full disk, and the test that runs them."""
BLOCKS = [block for block in blocks("operating.md") if block[0] not in TESTED_ELSEWHERE]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the data directory and the configuration of the samples; return their folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DELTA_PROP_TOKEN", raising=False)

    async def fill() -> None:
        async with Propagator(data="facts") as p:
            await p.attach(CallbackSink(lambda *_: None, name="audit"))
            ack = await p.publish(
                *(Delta(f"doc-{number}", create([float(number)]), "docs") for number in range(5))
            )
            await p.wait_visible(ack)

    anyio.run(fill)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGES["operating.md"], re.DOTALL)
    Path("delta-prop.toml").write_text(toml)
    shutil.copy(files().server, "server.pem")
    shutil.copy(files().server_key, "server.key")
    Path("tokens.toml").write_text(table("all", "t", publish=True, namespaces='["*"]'))
    return tmp_path


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[ServerAddresses]:
    """Serve a directory that holds a job with one staged delta, which is not decided."""
    with served(tmp_path / "served") as server_addresses:
        stage(server_addresses.protocol_address, 0, 1, [Delta("a", create([1.0]))], job="nightly")
        yield server_addresses


def mask_numbers(line: str) -> str:
    """Mask the numbers of a line, and the s of a plural."""
    line = re.sub(r"\b(\d[\d,.]*)\b", "#", line)
    return re.sub(r"\b(segment|batche?|row|file)s?\b", r"\1", line).rstrip()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0][2:40])
def test_operating_page_samples_print_shown_output(
    block: list[str], folder: Path, addresses: ServerAddresses, capfd: pytest.CaptureFixture[str]
) -> None:
    if any("log migrate" in line for line in block):
        shutil.rmtree("facts")
        with tarfile.open(ROOT / "tests" / "golden" / "0.1.0-all.tar.gz") as old:
            old.extractall("facts")
    printed: list[str] = []
    for line in block:
        if not line.startswith("$ "):
            continue
        printed.append(line)
        text = (
            line[2:]
            .replace("localhost:7374", addresses.http_address)
            .replace("localhost:7373", addresses.protocol_address)
        )
        arguments = shlex.split(text.replace("--for 10m", "--for 1s"))[1:]
        if arguments[0] == "serve" and "log migrate" not in str(block):
            printed.append(first_line(arguments))
            continue
        assert main(arguments) == FAILING_COMMANDS.get(line[2:], 0), (line, capfd.readouterr())
        shown = capfd.readouterr()
        if any(not output.startswith("$ ") for output in line_below(block, line)):
            printed += [*shown.err.splitlines(), *shown.out.splitlines()]
    assert list(map(mask_numbers, printed)) == list(map(mask_numbers, block))


def line_below(block: list[str], command: str) -> list[str]:
    """Return the line below a command, as a list; an empty list after the last line."""
    rest = block[block.index(command) + 1 :]
    return rest[:1]


def first_line(arguments: list[str]) -> str:
    """Start a server, end it after its first line of output, and return this line."""
    with_free_ports = [*arguments, "--port", "0", "--http-port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-m", "delta_prop", *with_free_ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        return server.stdout.readline().rstrip()
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_every_block_is_run_here_or_listed_elsewhere() -> None:
    assert all(block[0].startswith("$ delta-prop ") for block in BLOCKS)
    assert len(BLOCKS) + len(TESTED_ELSEWHERE) == len(blocks("operating.md"))
    assert all((ROOT / test).exists() for test in TESTED_ELSEWHERE.values())


# --- names on pages


def named_commands() -> list[tuple[str, str]]:
    """Return (page, command) for each command of delta-prop that a page names within a line."""
    commands = []
    for page, text in PAGES.items():
        for span in re.findall(r"`([^`\n]+)`", text):
            words = span.split()
            if words[:1] == ["delta-prop"] and len(words) > 1:
                commands.append((page, span))
    return commands


@pytest.mark.parametrize(("page", "command"), named_commands())
def test_named_command_exists(page: str, command: str) -> None:
    words = []
    for word in command.split()[1:]:
        if not re.fullmatch(r"[a-z]+", word):
            break
        words.append(word)
    parser = make_parser()
    for word in words:
        choices = [
            action.choices for action in parser._actions if hasattr(action, "choices") and action.choices
        ]
        verbs = next((by_name for by_name in choices if isinstance(by_name, dict)), None)
        if verbs is None:  # an argument, such as a name
            return
        assert word in verbs, command
        parser = verbs[word]


OWNERS = (delta_prop, Propagator, Producer, Subscriber, facts, Refused, delta_prop.Receipt)


def test_calls_named_on_errors_page_exist() -> None:
    text = PAGES["errors.md"]
    calls = set(re.findall(r"`([a-z_.]+)\(", text))
    calls |= set(re.findall(r"In Python, `([a-z_]+)`", text))
    calls |= set(re.findall(r"`([a-z_]+)` (?:the sink|a paused|its|the deltas)", text))
    assert {"attach", "restart", "resume", "replay", "drop", "publish"} <= calls
    for call in sorted(calls):
        name = call.rpartition(".")[2]
        assert any(hasattr(owner, name) for owner in OWNERS), call
