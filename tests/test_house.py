"""The measures of the structure count what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import measures

PARTS = """
class Engine:
    def __init__(self, start: Callable[[], None], *, speed: int) -> None:
        self.start, self.speed = start, speed

@dataclass
class Door:
    is_open: bool
    ring: Callable[[], None] | None = None

@dataclass(frozen=True, slots=True)
class Key:
    turn: Callable[[], None]
"""
LARGE = "class Hall:\n    def enter(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(13))


def cases(root: Path, files: dict[str, str]) -> dict[str, list[str]]:
    """Write a checkout with these files, and return the cases of each measure."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return {measure.name.partition(" ")[0]: measure.cases for measure in measures(root)}


def test_modules_beside_the_packages_are_loose(tmp_path: Path) -> None:
    files = {"delta_prop/__init__.py": "", "delta_prop/__main__.py": "", "delta_prop/loose.py": ""}
    assert cases(tmp_path, files | {"delta_prop/room/a.py": ""})["loose"] == ["delta_prop/loose.py"]


def test_packages_that_import_each_other_are_a_circle(tmp_path: Path) -> None:
    files = {
        "delta_prop/one/__init__.py": "",
        "delta_prop/one/a.py": "from delta_prop.two.b import B",
        "delta_prop/two/__init__.py": "",
        "delta_prop/two/b.py": "",
        "delta_prop/two/c.py": "def f():\n    from delta_prop.one.a import A",
    }
    assert cases(tmp_path, files)["circles"] == ["delta_prop.one delta_prop.two"]
    typing_only = "if TYPE_CHECKING:\n    from delta_prop.one.a import A"
    assert cases(tmp_path, {"delta_prop/two/c.py": typing_only})["circles"] == []


def test_modules_that_import_each_other_are_a_circle(tmp_path: Path) -> None:
    files = {"delta_prop/one/a.py": "import delta_prop.one.b", "delta_prop/one/b.py": "from .a import A"}
    assert cases(tmp_path, files)["circles"] == ["delta_prop.one.a delta_prop.one.b"]


def test_callables_of_constructors_count_but_for_values(tmp_path: Path) -> None:
    assert cases(tmp_path, {"sinks/delta_prop_sinks/parts.py": PARTS})["callables"] == [
        "sinks/delta_prop_sinks/parts.py:2: Engine(start)",
        "sinks/delta_prop_sinks/parts.py:7: Door(ring)",
    ]


def test_class_with_many_attributes_is_large(tmp_path: Path) -> None:
    files = {
        "wire/delta_prop_wire/hall.py": LARGE,
        "wire/delta_prop_wire/room.py": LARGE.replace("a12", "a0"),
    }
    assert cases(tmp_path, files)["classes"] == ["wire/delta_prop_wire/hall.py:1: Hall has 13"]


@pytest.mark.parametrize("kind", ["DurableLog", "MemoryLog", "MemoryLog | DurableLog"])
def test_questions_after_the_kind_of_a_log_count_outside_broker(tmp_path: Path, kind: str) -> None:
    question = f"isinstance(log, {kind})"
    files = {"delta_prop/server/a.py": question, "broker/delta_prop_broker/a.py": question}
    assert cases(tmp_path, files)["isinstance"] == [f"delta_prop/server/a.py:1: {question}"]


def test_private_names_and_patches_of_tests_count(tmp_path: Path) -> None:
    text = """
from package import _hidden, shown
class TestPart:
    def check(self, other, monkeypatch):
        self._own = other._hidden.shown._replace(a=1).__dict__
        monkeypatch.setattr(shown, "part", other)
        monkeypatch.setenv("HOME", "/")
"""
    found = cases(tmp_path, {"tests/test_a.py": text, "delta_prop/a.py": "b._hidden"})
    assert found["private"] == ["tests/test_a.py:2: _hidden", "tests/test_a.py:5: _hidden"]
    assert found["patches"] == ["tests/test_a.py:6: monkeypatch.setattr(shown, 'part', other)"]
