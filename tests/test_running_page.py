"""The page on running a service: its commands, the systemd unit and the container file work as described.

Commands that need root, a service manager, Docker or a web server are not run: the tests check their syntax,
and that the files that they name exist. The tests start the same server themselves, from the same files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from delta_prop.api.settings import Settings
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.segments.identity import FORMAT
from delta_prop_sinks.storage_file import SCHEMA_VERSION
from delta_prop_wire.spec import VERSION
from tests.net.ports import free_ports
from tests.test_packaging import fresh_environment, install_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "running.md").read_text()
DEPLOY = ROOT / "examples" / "deploy"
UNIT, CONTAINER, CONFIG = (
    DEPLOY / name for name in ("delta-prop.service", "Containerfile", "delta-prop.toml")
)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
START_S_MAX = 60.0


@dataclass
class Machine:
    """The machine that the page describes, with its folders in the test's folder, and with free ports."""

    root: Path
    ports: tuple[int, int] = field(default_factory=free_ports)
    tools: Path = Path(sys.executable).parent

    def __post_init__(self) -> None:
        for folder in ("work", "opt", "etc", "var", "backups"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "work" / "delta-prop").symlink_to(ROOT)
        self.replacements = {
            "/opt/delta-prop": str(self.root / "opt" / "delta-prop"),
            "/etc/delta-prop": str(self.root / "etc"),
            "/var/lib/delta-prop": str(self.root / "var"),
            "/var/backups/delta-prop": str(self.root / "backups"),
            "7373": str(self.ports[0]),
            "7374": str(self.ports[1]),
            "sudo -u delta-prop ": "",
        }

    def localize(self, text: str) -> str:
        """Return a text with the paths and ports of this machine."""
        return re.sub("|".join(self.replacements), lambda match: self.replacements[match[0]], text)

    def localize_command(self, command: str) -> str:
        """Return a command with the paths and ports of this machine, quoted, as paths may contain spaces."""
        return re.sub("|".join(self.replacements), lambda match: quote(self.replacements[match[0]]), command)

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands: pip uses local files only; the server uses this machine's ports."""
        return {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # 0 disables build isolation
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "DELTA_PROP_SERVER__PORT": str(self.ports[0]),
            "DELTA_PROP_SERVER__HTTP_PORT": str(self.ports[1]),
        }

    def run(self, command: str, text: str = "") -> list[str]:
        """Run a command; return stdout and stderr."""
        completed = subprocess.run(
            ["bash", "-c", self.localize_command(command)],
            cwd=self.root / "work",
            env=self.env,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        self._lend_dependencies()
        return completed.stdout.splitlines()

    def _lend_dependencies(self) -> None:
        """Let a new environment see the packages of this one, as pip has no network here."""
        lend_dependencies(self.replacements["/opt/delta-prop"])

    @contextmanager
    def serving(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """Start a server with a command of a file; end it with SIGTERM, in time and without error."""
        with open(self.root / "journal", "a") as journal:
            process = subprocess.Popen(
                shlex.split(self.localize_command(command)),
                cwd=self.root / "var",
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=journal,
                text=True,
            )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == self.localize("ready port=7373 http=7374\n"), read_journal(
                self
            )
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S_MAX) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def quote(text: str) -> str:
    return text and shlex.quote(text)


def lend_dependencies(environment: str) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": environment}))
    if site.exists():
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def folder_with_pip(folder: Path) -> Path:
    """Return the folder of a Python with pip that sees our packages: uv installs no pip."""
    if find_spec("pip") is not None:
        return Path(sys.executable).parent
    venv.create(folder, with_pip=True, symlinks=True)
    lend_dependencies(str(folder))
    return folder / "bin"


def read_journal(machine: Machine) -> str:
    return (machine.root / "journal").read_text()


def parse_console(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with its output lines."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def matches_shown(line: str, shown: str) -> bool:
    """True if a line equals the page's line, except for numbers, and for the core that runs."""
    pattern = re.sub(r"\d(?:[\d.,]*\d)?", lambda _: r"\d[\d.,]*", re.escape(shown).replace(r"\.", "."))
    pattern = pattern.replace("python\\ core", "(native|python) core")
    return re.fullmatch(pattern.replace("…", ".*"), line) is not None


def test_page_commands_print_shown_output(tmp_path: Path) -> None:
    pytest.importorskip("ensurepip", reason="the page's `python3 -m venv` does not work on this machine")
    machine = Machine(tmp_path, tools=folder_with_pip(tmp_path / "with pip"))
    commands_run = 0
    with ExitStack() as services:
        for language, block in BLOCKS:
            if language == "toml":
                assert block == CONFIG.read_text()
                (machine.root / "etc" / "delta-prop.toml").write_text(machine.localize(block))
            elif language == "sh" and "systemctl enable --now delta-prop" in block:
                services.enter_context(machine.serving(unit()["Service"]["ExecStart"]))
                lines = '{"vector_id": "apple", "op": "create", "values": [1, 0]}\n' * 3
                machine.run("/opt/delta-prop/bin/delta-prop publish --to localhost:7373", lines)
            elif language == "console":
                for command, shown in parse_console(block):
                    printed = machine.run(command)
                    expected = [machine.localize(line) for line in shown]
                    assert len(printed) == len(expected), (command, printed, read_journal(machine))
                    assert all(map(matches_shown, printed, expected)), (command, printed, expected)
                    commands_run += 1
    assert commands_run >= 12


def test_commands_not_run_have_valid_syntax_and_paths() -> None:
    shown = [block for language, block in BLOCKS if language == "sh"]
    assert len(shown) >= 3
    for block in shown:
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
        for path in re.findall(r"(?<![\w/])examples/[\w./-]+", block):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"\b(examples\.\w+):app\b", block):
            assert "\napp = " in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    installed = dict(re.findall(r"^install .* (examples/\S+) (/\S+)$", "\n".join(shown), re.MULTILINE))
    assert installed["examples/deploy/delta-prop.toml"] in unit()["Service"]["ExecStart"]


# --- the unit


def unit() -> dict[str, dict[str, str]]:
    """Return the unit's keys and values by section; no key occurs twice."""
    sections: dict[str, dict[str, str]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            assert key not in section, line
            section[key] = value
    return sections


def test_unit_limits_cover_default_settings() -> None:
    service, server = unit()["Service"], ServerSettings()
    assert set(unit()) == {"Unit", "Service", "Install"}
    assert int(service["TimeoutStopSec"]) > server.drain_timeout_s + Settings().close_timeout_s
    connections = server.connections_max + server.http_connections_max
    assert int(service["LimitNOFILE"]) > 2 * connections + 100
    assert service["MemoryMax"] == "8G"
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("is_broken", [False, True])
def test_systemd_verify_accepts_only_valid_unit(tmp_path: Path, is_broken: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine: only this test parsed the unit")
    text = UNIT.read_text().replace("/opt/delta-prop/bin/delta-prop", "/bin/true")  # the program must exist
    file = tmp_path / UNIT.name
    file.write_text(text.replace("RestartSec=", "RestartSecs=") if is_broken else text)
    completed = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    findings = [line for line in completed.stderr.splitlines() if UNIT.name in line]
    assert bool(findings) is is_broken, completed.stderr
    assert is_broken or completed.returncode == 0, completed.stderr


# --- the container file


def instructions() -> list[tuple[str, str]]:
    """Return the container file's instructions, each on one line."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line]


def exec_form(text: str) -> list[str]:
    return re.findall(r'"([^"]*)"', text)


@pytest.mark.parametrize("is_broken", [False, True])
def test_hadolint_accepts_only_valid_container_file(tmp_path: Path, is_broken: bool) -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not built for this machine: only this test parsed the container file")
    file = tmp_path / CONTAINER.name
    text = CONTAINER.read_text()
    file.write_text(text.replace("python:3.13-slim", "python:latest") if is_broken else text)
    completed = subprocess.run([linter, str(file)], capture_output=True, text=True, check=False)
    assert (completed.returncode != 0) is is_broken, completed.stdout + completed.stderr


def test_container_files_suffice_to_build_and_serve(tmp_path: Path) -> None:
    """Docker is not run: the files are copied, and the wheel built from them serves with the same command."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name, text in instructions():
        if name == "COPY" and not text.startswith("--from"):
            *sources, to = text.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, checkout / to, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, checkout / to)
    (pins, _, install) = next(text for name, text in instructions() if name == "RUN").split("&&")
    subprocess.run(["sh", "-c", pins], cwd=checkout, check=True)
    pinned = [Requirement(line) for line in (checkout / "constraints.txt").read_text().splitlines()]
    assert len(pinned) == len(re.findall(r"(?m)^\S+==", (ROOT / "requirements.lock").read_text()))
    words = shlex.split(install)
    (requirement,) = (Requirement(f"delta-prop{word[1:]}") for word in words if word.startswith(".["))
    assert requirement.extras == {"fast", "compress", "hnsw"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    site, python = fresh_environment(tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    install_wheel(wheel, site, python)
    serve_like_container(tmp_path, python)


def serve_like_container(folder: Path, python: Path) -> None:
    machine = Machine(folder / "machine")
    instruction = dict(instructions())  # the last instruction of each name
    delta_prop, data = str(python.parent / "delta-prop"), folder / "machine" / "var"
    tokens = subprocess.run(
        [delta_prop, "token", "new", "app", "--publish", "--namespace", "*"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "machine" / "etc" / "tokens.toml").write_text(tokens.stdout)
    words = [*exec_form(instruction["ENTRYPOINT"]), *exec_form(instruction["CMD"])]
    assert words[0] == "delta-prop"
    replacements = {
        "/data": str(data),
        "0.0.0.0": "127.0.0.1",
    }  # the test listens on the loopback interface only
    words = [re.sub("^/data|^0.0.0.0$", lambda match: replacements[match[0]], word) for word in words[1:]]
    with machine.serving(shlex.join([delta_prop, *map(machine.localize, words)])):
        health = [
            machine.localize(word) for word in exec_form(instruction["HEALTHCHECK"].partition("CMD")[2])
        ]
        assert health[0] == "python"
        subprocess.run([str(python), *health[1:]], check=True, timeout=START_S_MAX)
    completed = subprocess.run(
        [str(python), *health[1:]], check=False, capture_output=True, timeout=START_S_MAX
    )
    assert completed.returncode != 0


# --- formats


def test_later_format_is_refused_with_shown_error(tmp_path: Path) -> None:
    data = tmp_path / "facts"
    data.mkdir()
    (data / "format").write_text('{"format": 3, "made_by": "a later version"}')
    command = [sys.executable, "-m", "delta_prop", "log", "verify", "--data", str(data)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    (shown,) = (block for language, block in BLOCKS if language == "text" and "format 3" in block)
    assert completed.returncode == 1
    assert matches_shown(completed.stderr.strip(), shown.strip()), completed.stderr
    assert [path.name for path in data.iterdir()] == ["format"]
    for number in (
        f"format {FORMAT}, in the file `format`",
        f"version {VERSION}, in each frame",
        f"format {SCHEMA_VERSION}, in `user_version`",
    ):
        assert f" {number} |" in PAGE


def test_page_names_error_of_second_process() -> None:
    assert f"`{LogBusy.__module__}.{LogBusy.__qualname__}`" in PAGE
