"""The documentation is correct: links resolve, code runs, every setting, code and verb is described."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from delta_prop.api.settings import Settings
from delta_prop.client import ClientSettings
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_sync_producer import served
from tools.architecture import source_files

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "LICENSES.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the usual viewers form them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_existing_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file_name, _, anchor = target.partition("#")
        target_path = (page.parent / file_name).resolve() if file_name else page
        assert target_path.exists(), f"{page.name}: {target}"
        if anchor and target_path.suffix == ".md":
            assert anchor in anchors(target_path), f"{page.name}: {target}"


def programs(page: Path) -> list[tuple[str, str]]:
    """Return the programs of a page that are followed by their output."""
    programs_with_output = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", page.read_text(), re.DOTALL
    )
    assert programs_with_output
    return programs_with_output


def check_program(program: str, printed: str, directory: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=180,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == printed


def test_readme_programs_print_shown_output(tmp_path: Path) -> None:
    for program, printed in programs(ROOT / "README.md"):
        check_program(program, printed, tmp_path)


def test_notebook_program_prints_shown_output(tmp_path: Path) -> None:
    for program, printed in programs(ROOT / "docs" / "running.md"):
        check_program(program, printed, tmp_path)


def test_client_page_programs_print_shown_output(tmp_path: Path) -> None:
    with served() as service:  # one service for all programs, as in the page
        service.store(tmp_path / "vectors.db")
        for program, printed in programs(ROOT / "docs" / "client.md"):
            check_program(program.replace("127.0.0.1:7373", service.address), printed, tmp_path)


def test_every_client_setting_is_described() -> None:
    text = (ROOT / "docs" / "client.md").read_text()
    names = [field.name for field in dataclasses.fields(ClientSettings)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_reference_lists_every_run_verb() -> None:
    reference = set(re.findall(r"\./run ([a-z-]+)", (ROOT / "docs" / "reference.md").read_text()))
    readme = set(re.findall(r"\./run ([a-z-]+)", (ROOT / "README.md").read_text()))
    completed = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True)
    help_verbs = set(re.findall(r"^  ([a-z-]+)", completed.stdout, re.MULTILINE))
    assert reference == help_verbs
    assert {"demo", "test"} <= readme <= help_verbs


@pytest.mark.parametrize("page", ["errors.md", "protocol.md"])
def test_every_error_code_is_described(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [code.name for code in ErrorCode if not re.search(rf"\b{code.name}\b", text)] == []


def test_every_setting_is_described() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = [field.name for field in dataclasses.fields(Settings)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_server_setting_is_described() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_decision_numbers_are_unique() -> None:
    numbers = [page.name[:4] for page in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers)), sorted(numbers)


def test_table_of_changes_names_existing_files_and_names() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    table = page.partition("## Where do I change")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    sources = "\n".join(path.read_text("utf-8") for path in source_files(ROOT))
    defined = set(re.findall(r"^\s*(?:async def|def|class) (\w+)|^(\w+) = ", sources, re.MULTILINE))
    names = {name for pair in defined for name in pair}
    assert len(rows) >= 20
    for row in rows:
        folder = ROOT
        for name in re.findall(r"`([\w./]+)`", row):
            if "/" in name or name.endswith(".py"):
                target = ROOT / name if (ROOT / name).exists() else folder / name
                assert target.exists(), f"{name}: no such file; the row is {row[:60]}"
                folder = target.parent if target.is_file() else target
            else:
                assert set(name.split(".")) <= names, f"{name}: not defined; the row is {row[:60]}"
