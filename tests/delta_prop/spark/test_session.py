"""Spark starts, and its workers run this Python."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_workers_run_this_python(spark: SparkSession) -> None:
    executables = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert executables == [sys.executable]


def test_session_finds_the_format_if_the_python_path_has_a_space(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("starts Java once more")
    python = tmp_path / "new folder" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    read = 'print(*{"vector_id"}.intersection(session().read.format("delta_prop").load().columns))'
    result = subprocess.run(
        [sys.executable, "-c", f"from delta_prop.spark import session\n{read}"],
        env=os.environ | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "vector_id\n"), result.stderr[-2000:]
