"""Without Java, tests with Spark are reported as not run, with a line that says how to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIX = "Spark needs Java 17 or later, but JAVA_HOME=/nowhere holds no bin/java: "


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tests with Spark with a JAVA_HOME that holds no Java."""
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", *arguments]
    tests = "tests/delta_prop/spark/test_session.py"
    return subprocess.run(
        [*command, tests],
        cwd=ROOT,
        env=os.environ | {"JAVA_HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_spark_tests_without_java_are_skipped_with_fix() -> None:
    completed = run()
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"2 tests with Spark did not run: {FIX}" in completed.stdout
    assert "2 skipped" in completed.stdout


def test_spark_option_without_java_fails() -> None:
    completed = run("--spark")
    assert completed.returncode != 0
    assert FIX in completed.stdout + completed.stderr
