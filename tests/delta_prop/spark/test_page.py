"""docs/spark.md is correct: its programs run, and it names every option and every column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delta_prop.spark import options
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the section of the page under a title."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert match, title
    return match[1]


def first_cells(text: str) -> list[str]:
    """Return the names in the first column of a table."""
    return [
        name
        for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]


def test_page_documents_every_option_and_no_other() -> None:
    known_options = {
        *options._CONNECTION_OPTIONS,
        *options._TIMEOUT_OPTIONS,
        *(name for names in options._OPTIONS_BY_USE.values() for name in names),
    }
    assert sorted(first_cells(section("Options"))) == sorted(known_options)


def test_page_documents_every_column_and_no_other() -> None:
    rows = pytest.importorskip("delta_prop.spark.data_source.rows", exc_type=ImportError)
    assert sorted(first_cells(section("Columns"))) == sorted(rows.STREAM_SCHEMA.names)


@pytest.mark.spark
def test_programs_of_the_page_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(programs) >= 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with served(tmp_path / "data") as server:
        for program in programs:
            text = program.replace("localhost:7373", f"127.0.0.1:{server.port}")
            exec(compile(text, "docs/spark.md", "exec"), names)
    assert "|doc-1|create|" in re.sub(r" +", "", capsys.readouterr().out)
