"""The table of mutants is valid: each matches its code, changes it, and is completely undone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delta_prop_simulations.chaos.mutants.catalogue import MUTANTS
from delta_prop_simulations.chaos.mutants.mutant import (
    CallCounter,
    Mutant,
    apply_mutant,
    edit,
    getter,
    mutate,
)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_matches_its_code(name: str) -> None:
    for code_edit in MUTANTS[name].edits:
        mutated, original = mutate(code_edit, name), code_edit.function.__code__
        assert mutated.co_code != original.co_code
        assert mutated.co_varnames[: mutated.co_argcount] == original.co_varnames[: original.co_argcount]
        assert mutated.co_flags == original.co_flags


def test_names_and_sentences_have_one_style() -> None:
    assert len(MUTANTS) >= 24
    for name, mutant in MUTANTS.items():
        assert name == mutant.name
        assert name == name.lower()
        for sentence in (mutant.what, mutant.promise):
            assert sentence
            assert not sentence.endswith(".")
            assert sentence[0].islower()


def test_page_has_a_row_for_each_mutant() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    section = page.partition("\n## Mutants\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \|", section, re.MULTILINE)
    assert rows == [(mutant.name, mutant.what) for mutant in MUTANTS.values()]


class _Base:
    def base(self) -> int:
        return 3


class _Subject(_Base):
    def base(self) -> int:
        """Return one more than the base class."""
        return super().base() + 1

    @property
    def seven(self) -> int:
        return self.base() + 3


def test_mutated_code_runs_only_while_mutant_is_applied() -> None:
    subject = _Subject()
    bound_method = subject.base
    mutant = Mutant("two-more", "it adds two", "it adds one", edit(_Subject.base, "+ 1", "+ 2"))
    with apply_mutant(mutant) as calls:
        assert (bound_method(), subject.seven) == (5, 8)
        assert calls.count == 2
    assert (bound_method(), subject.seven) == (4, 7)
    assert calls.count == 2
    assert not any(isinstance(value, CallCounter) for value in globals().values())


def test_mutated_getter_is_restored_after_an_error() -> None:
    mutant = Mutant("minus", "it takes away", "it adds", edit(getter(_Subject, "seven"), "+ 3", "- 3"))
    with pytest.raises(ZeroDivisionError), apply_mutant(mutant):
        assert 1 // (_Subject().seven - 1)
    assert _Subject().seven == 7


@pytest.mark.parametrize("old_text", ["nowhere", "s"])
def test_mutant_with_no_unique_match_is_refused(old_text: str) -> None:
    code_edit = edit(_Subject.base, old_text, "something else")
    with pytest.raises(LookupError, match="update the mutant"):
        mutate(code_edit, "stale")
