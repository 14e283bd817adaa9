"""The checkout keeps the rules of architecture, and each rule finds a violation planted in a tree.

The rules are defined only in tools/architecture.py; ruff's list in pyproject.toml must agree.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.architecture import (
    BANNED_MODULES,
    BANNED_NAMES,
    FOLDERS,
    PURE,
    SYSTEM,
    Violation,
    matches,
    source_files,
    violations,
)

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    *(
        ".ci",
        ".github",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "LICENSES.md",
        "README.md",
    ),
    *("benchmarks", "broker", "changes", "delta_prop", "docs", "examples", "native", "simulations", "sinks"),
    *("pyproject.toml", "run", "tests", "tools", "wire", "pyspark_delta_prop.py"),
    *("requirements.lock", "requirements-spark.lock"),
}
FILE_BYTES_MAX = 1 << 20
DOCSTRING = '"""A planted file. It does nothing."""\n'


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the tree was copied without its history")
def test_committed_files_are_expected_and_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=True)
    paths = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    assert {path.parts[0] for path in paths} == TOP_LEVEL
    present = [path for path in paths if (ROOT / path).exists()]
    assert [path for path in present if (ROOT / path).stat().st_size > FILE_BYTES_MAX] == []


def test_forbidden_import_in_real_tree_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = FOLDERS["delta_prop_wire"]
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert violations(tmp_path) == []
    spec = tmp_path / "wire/delta_prop_wire/spec.py"
    spec.write_text(spec.read_text() + "\nimport delta_prop_broker\nimport time\n")
    found = [(violation.path, violation.rule) for violation in violations(tmp_path)]
    assert set(found) == {("wire/delta_prop_wire/spec.py", rule) for rule in ("arrow", "purity", "port")}


@pytest.mark.parametrize(
    ("relative_path", "text", "rule"),
    [
        ("wire/delta_prop_wire/a.py", "import delta_prop_broker", "arrow"),
        ("wire/delta_prop_wire/a.py", "import delta_prop", "arrow"),
        ("broker/delta_prop_broker/a.py", "from delta_prop_sinks.sink import Sink", "arrow"),
        ("sinks/delta_prop_sinks/a.py", "from delta_prop_broker import Log", "arrow"),
        ("sinks/delta_prop_sinks/a.py", "from delta_prop.platform.ports import Clock", "arrow"),
        ("sinks/delta_prop_sinks/a.py", "def f():\n    from delta_prop import client", "arrow"),
        (
            "sinks/delta_prop_sinks/a.py",
            "from importlib import import_module\nimport_module('delta_prop')",
            "arrow",
        ),
        ("sinks/delta_prop_sinks/a.py", "from importlib import import_module\nimport_module(a)", "arrow"),
        ("delta_prop/a.py", "import delta_prop_simulations", "arrow"),
        ("delta_prop/a.py", "import tests.conftest", "arrow"),
        ("delta_prop/a.py", "from broker.delta_prop_broker import log", "arrow"),
        ("wire/delta_prop_wire/a.py", "import anyio", "purity"),
        ("delta_prop/partition/order/a.py", "from anyio import Event", "purity"),
        ("delta_prop/partition/order/deep/a.py", "def f():\n    import anyio", "purity"),
        ("delta_prop/partition/order/a.py", "from delta_prop.calls.receipt import Receipt", "purity"),
        ("delta_prop/partition/order/a.py", "from ...calls.receipt import Receipt", "purity"),
        ("delta_prop/calls/outcomes.py", "import anyio", "purity"),
        ("delta_prop/a.py", "import time", "port"),
        ("delta_prop/a.py", "from time import monotonic", "port"),
        ("delta_prop/a.py", "import random", "port"),
        ("delta_prop/a.py", "import numpy as np\nx = np.random.default_rng()", "port"),
        ("delta_prop/a.py", "from numpy import random", "port"),
        ("delta_prop/a.py", "import uuid", "port"),
        ("delta_prop/a.py", "from datetime import datetime\nx = datetime.now()", "port"),
        ("delta_prop/a.py", "import os.path", "port"),
        ("delta_prop/a.py", "import socket", "port"),
        ("delta_prop/a.py", "import threading", "port"),
        ("delta_prop/a.py", "from concurrent.futures import ThreadPoolExecutor", "port"),
        ("delta_prop/a.py", "import anyio\nf = anyio.to_thread.run_sync", "port"),
        ("delta_prop/a.py", "from anyio import to_thread", "port"),
        ("delta_prop/a.py", "from anyio import connect_tcp", "port"),
        ("delta_prop/a.py", "x = open('f')", "port"),
        ("delta_prop/a.py", "read = open", "port"),
        ("delta_prop/a.py", "def f(p):\n    return p.read_text()", "port"),
        ("delta_prop/a.py", "def f(p):\n    p.write_bytes(b'')", "port"),
        ("delta_prop/a.py", "from pathlib import Path\nx = Path('f').open()", "port"),
        ("sinks/delta_prop_sinks/a.py", "import sqlite3", "port"),
        ("delta_prop/a.py", "import sniffio", "dependency"),
        ("delta_prop/a.py", "import zstandard", "dependency"),
        ("delta_prop/a.py", "def f():\n    import pyspark", "dependency"),
        ("tests/a.py", "x = 1\n" * 651, "length"),
        ("delta_prop/a.py", "def f():\n" + "    x = 1\n" * 70, "length"),
        ("tests/a.py", "class C:\n    async def f(self):\n" + "        x = 1\n" * 70, "length"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, relative_path: str, text: str, rule: str) -> None:
    found = violations_of_file(tmp_path, relative_path, DOCSTRING + text)
    assert {violation.rule for violation in found} >= {rule}


def test_file_without_docstring_is_found(tmp_path: Path) -> None:
    assert [violation.rule for violation in violations_of_file(tmp_path, "tests/a.py", "x = 1\n")] == [
        "docstring"
    ]


@pytest.mark.parametrize(
    ("relative_path", "text"),
    [
        ("broker/delta_prop_broker/a.py", "from delta_prop_wire.batch import Batch"),
        ("simulations/delta_prop_simulations/a.py", "import delta_prop, delta_prop_sinks"),
        ("delta_prop/a.py", "import anyio\nx = anyio.current_time"),
        ("delta_prop/a.py", "async def f(sink):\n    await sink.open(1)"),
        ("delta_prop/a.py", "def f():\n    import zstandard"),
        ("delta_prop/spark/a.py", "import pyarrow"),
        (
            "delta_prop/a.py",
            "from pathlib import PurePath\nasync def f(sink):\n    await sink.open(PurePath())",
        ),
        ("delta_prop/platform/world.py", "import os, random, socket, threading, time\nx = open('f')"),
        (
            "delta_prop/partition/order/a.py",
            "from delta_prop.partition.order.clock import covers\nfrom ..ingest import work",
        ),
        (
            "delta_prop/partition/order/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import delta_prop.calls.receipt",
        ),
        ("tests/a.py", "import time, socket"),
    ],
)
def test_allowed_code_passes(tmp_path: Path, relative_path: str, text: str) -> None:
    assert violations_of_file(tmp_path, relative_path, DOCSTRING + text) == []


def test_every_pattern_matches_a_file() -> None:
    relative_paths = [path.relative_to(ROOT).as_posix() for path in source_files(ROOT)]
    unmatched = [
        pattern
        for pattern in (*PURE, *SYSTEM)
        if not any(matches(relative_path, [pattern]) for relative_path in relative_paths)
    ]
    assert unmatched == []


def test_bans_are_lifted_for_system_modules_and_outer_folders_only() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    lifted = {pattern for pattern, rules in lint["per-file-ignores"].items() if "TID251" in rules}
    assert {"time", "socket", "threading"} <= BANNED_MODULES
    assert {"builtins.open", "anyio.to_thread"} <= BANNED_NAMES
    assert {pattern for pattern in lifted if pattern.endswith("/**")} == {
        "tests/**",
        "benchmarks/**",
        "examples/**",
        "tools/**",
    }


def violations_of_file(root: Path, relative_path: str, text: str) -> list[Violation]:
    """Return the violations found in a tree of one file."""
    shutil.copy(ROOT / "pyproject.toml", root)
    path = root / relative_path
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return violations(root)
