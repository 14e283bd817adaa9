"""The check of words finds each kind of violation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import words
from tools.words import violations

LISTS = """
renamed delta_prop.old_module
renamed delta_prop.stock.OldStock
renamed delta_prop.stock.Stock.old_count
word old_setting
root told
root kept
root let_go
stays kept_before a key of saved files
"""
VALID_MODULE = '''"""The stock of a shop."""

class Stock:
    """The goods, by name."""

    def __init__(self) -> None:
        self.kept_before = 0
'''


def checkout(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"delta_prop/old_module.py": ""}, "delta_prop.old_module was renamed"),
        (
            {"delta_prop/stock.py": VALID_MODULE + "\n\nclass OldStock:\n    pass\n"},
            "delta_prop.stock.OldStock was renamed",
        ),
        (
            {"delta_prop/stock.py": VALID_MODULE + "        self.old_count = 1\n"},
            "delta_prop.stock.Stock.old_count was renamed",
        ),
        ({"docs/page.md": "Set `old_setting` to 5.\n"}, "docs/page.md:1: old_setting was renamed"),
        ({"changes/first.md": "`old_setting` is new.\n"}, None),
        ({"delta_prop/more.py": "def is_told() -> bool: ...\n"}, "is_told has a part to avoid"),
        ({"delta_prop/more.py": "letGo = let_go_now = 1\n"}, "let_go_now has a part to avoid"),
        (
            {"delta_prop/stock.py": VALID_MODULE.replace("kept_before", "before")},
            "kept_before does not occur",
        ),
        ({"delta_prop/more.py": '"""Whether it is so."""\n'}, "1 docstrings open with a question word"),
        ({"tests/test_more.py": '"""Whether it is so."""\n'}, "1 docstrings open with a question word"),
        ({"delta_prop/more.py": "# it is told\n"}, "lines contain told"),
    ],
)
def test_violation_is_found_and_named(
    files: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "names.txt"
    lists.write_text(LISTS)
    monkeypatch.setattr(words, "LISTS", lists)
    monkeypatch.setattr(words, "QUESTION_WORDS_MAX", 0)
    monkeypatch.setattr(words, "OVERUSED_LINES_MAX", 0)
    lines = violations(checkout(tmp_path / "checkout", {"delta_prop/stock.py": VALID_MODULE} | files))
    if found is None:
        assert lines == []
    else:
        assert any(found in line for line in lines), lines


def test_line_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("stays told\n")
    with pytest.raises(ValueError, match="'stays told': write renamed, word, root, or stays with a reason"):
        words.read_lists(tmp_path / "names.txt")
