"""The command: exit statuses, help for every subcommand, one line per error, no early imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from importlib.metadata import version
from pathlib import Path

import pytest

import delta_prop
from delta_prop.cli import CORRUPTIBLE, FAILED, OK, USAGE_ERROR, main, make_parser
from delta_prop.demo.wiring import SINKS
from delta_prop_wire.core import core_mode


def subcommands() -> dict[str, ArgumentParser]:
    (action,) = [action for action in make_parser()._actions if isinstance(action, _SubParsersAction)]
    return dict(action.choices)


@pytest.mark.parametrize("subcommand", subcommands())
def test_every_subcommand_has_help_with_an_example(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([subcommand, "--help"]) == OK
    output = capsys.readouterr().out
    assert f"delta-prop {subcommand}" in output.partition("example")[2]
    assert subcommands()[subcommand].epilog


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == OK
    output = capsys.readouterr().out
    assert all(f"    {subcommand} " in output for subcommand in subcommands())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no verb"),
        (["dmo"], "invalid choice: 'dmo'"),
        (["demo", "--corrupt", "everything"], "choose from"),
        (["demo", "--onse"], "--onse"),
        (["demo", "--path"], "expected one argument"),
        (["demo", "--path", "/nowhere/at/all"], "no folder of that name"),
        (["version", "1"], "unrecognized"),
    ],
)
def test_wrong_arguments_print_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == USAGE_ERROR
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.err.startswith("delta-prop")


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version_prints_package_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == OK
    assert capsys.readouterr().out == f"delta-prop {version('delta-prop')}, {core_mode.name} core\n"
    assert delta_prop.__version__ == version("delta-prop")


def test_verb_with_an_event_loop_shortens_the_switch_interval(tmp_path: Path) -> None:
    program = (
        "import sys; from delta_prop.cli import main; before = sys.getswitchinterval(); "
        "main(['publish', '--data', 'd', '/dev/null']); print(before, sys.getswitchinterval())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines()[-1:] == ["0.005 0.0005"], run.stderr


def test_help_imports_no_slow_module() -> None:
    program = (
        "import json, sys; from delta_prop.cli import main; main(['--help']); "
        "print(json.dumps(sorted(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(finished.stdout.splitlines()[-1]))
    assert loaded & {"anyio", "asyncio", "numpy", "sqlite3", "uvloop", "msgpack"} == set()


def test_closed_stdout_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "delta_prop", "demo", "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"delta-prop demo")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == FAILED


@pytest.mark.parametrize("subcommand", sorted(subcommands().keys() - {"demo", "version"}))
def test_every_subcommand_is_in_the_reference(subcommand: str) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert re.search(rf"`delta-prop {subcommand} ", reference), f"describe {subcommand} in docs/reference.md"


def test_corrupt_choices_are_the_demo_sinks() -> None:
    assert CORRUPTIBLE == SINKS
