"""docs/sinks.md agrees with the contract, the examples and the programs that it shows."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import delta_prop
import delta_prop.sinks
from delta_prop_sinks.conformance import RULES
from delta_prop_sinks.sink import Sink
from tests.test_docs import check_program, programs
from tests.test_examples import PRINTED

ROOT = Path(__file__).parent.parent
SINKS = ROOT / "docs" / "sinks.md"
EXAMPLE = ROOT / "examples" / "table_sink.py"
SCREEN_LINES, SCREEN_COLUMNS = 50, 110


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def appears_in(block: str, lines: list[str]) -> bool:
    """True if a file has the lines of a block, in this order, without a gap, at any indentation."""
    block_lines = textwrap.dedent(block).splitlines()
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(block_lines)])).splitlines() == block_lines
        for start in range(len(lines))
    )


def test_sinks_page_programs_print_shown_output(tmp_path: Path) -> None:
    for program, printed in programs(SINKS):
        check_program(program, printed, tmp_path)


def test_other_code_of_page_is_in_example_or_its_test() -> None:
    shown_programs = {program for program, _ in programs(SINKS)}
    files = [EXAMPLE, ROOT / "tests" / "sinks" / "test_table_sink.py"]
    lines = [file.read_text().splitlines() for file in files]
    shown = [block for block in blocks(SINKS, "python") if block not in shown_programs]
    assert len(shown) >= 5
    for block in shown:
        assert any(appears_in(block, file) for file in lines), block


def test_page_shows_output_of_example() -> None:
    (console,) = blocks(SINKS, "console")
    assert console.splitlines() == ["$ python examples/table_sink.py", *PRINTED["table_sink"]]


def test_sink_examples_import_only_public_names() -> None:
    public = {"delta_prop": delta_prop.__all__, "delta_prop.sinks": delta_prop.sinks.__all__}
    for example in (EXAMPLE, EXAMPLE.with_name("own_sink.py")):
        imported = [
            (node.module, name.name)
            for node in ast.walk(ast.parse(example.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("delta_prop")
            for name in node.names
        ]
        assert imported
        assert [(module, name) for module, name in imported if name not in public.get(module, ())] == []


def test_contract_fits_on_one_screen() -> None:
    contract = SINKS.read_text().partition("\n## The smallest")[0]
    rows = [" ".join(cell.strip() for cell in line.split("|")) for line in contract.splitlines()]
    wrapped = [part for row in rows for part in textwrap.wrap(row, SCREEN_COLUMNS) or [""]]
    assert len(wrapped) <= SCREEN_LINES
    docstring = inspect.getdoc(Sink)
    assert docstring is not None
    assert len(docstring.splitlines()) <= SCREEN_LINES


def test_page_and_docstring_contracts_name_same_terms() -> None:
    page = SINKS.read_text().partition("\n## The smallest")[0]
    docstring = inspect.getdoc(Sink) or ""
    exceptions = ("TryAgain", "RejectDelta", "StopSink")
    functions = ("committed", "must_fold_again", "fold_again", "check_sink")
    rules = ("order", "return", "duplicates", "cancellation", "quarantine", "forwarded rows")
    for name in (*exceptions, *functions, *rules):
        assert name.lower() in page.lower(), name
        assert name.lower() in docstring.lower(), name


def test_page_names_every_rule_and_optional_protocol() -> None:
    text = SINKS.read_text()
    kit = text.partition("## The conformance kit")[2]
    assert [rule for rule in RULES if f"`{rule}`" not in kit] == []
    optional = text.partition("## Optional parts")[2]
    source = inspect.getsource(inspect.getmodule(Sink))  # type: ignore[arg-type]
    parts = re.findall(r"^@runtime_checkable\nclass (\w+)\(Protocol\)", source, re.MULTILINE)
    assert len(parts) >= 6
    assert [part for part in parts if part not in optional] == []
