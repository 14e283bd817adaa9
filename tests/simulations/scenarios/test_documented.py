"""docs/simulation.md describes each key of a scenario with its default."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from delta_prop_simulations.scenarios.reading import read_setups, timed_keys
from delta_prop_simulations.scenarios.scenario import (
    AlternativeSpec,
    Deltas,
    Event,
    Scenario,
    Service,
    SinkSpec,
    SourceSpec,
)

PAGE = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
TABLES = {
    "### The scenario": Scenario,
    "### [service]": Service,
    "### [[source]]": SourceSpec,
    "In `deltas`:": Deltas,
    "### [[sink]]": SinkSpec,
    "In each entry of `faults`:": Event,
    "### [[alternative]]": AlternativeSpec,
}


def rows(heading: str) -> dict[str, str]:
    """Return key and default of each row of the table below a heading."""
    table = PAGE.partition(f"{heading}\n")[2].partition("|---|---|---|\n")[2].partition("\n\n")[0]
    matches = [re.match(r"\| `(\w+)` \| (.*?) \|", line) for line in table.splitlines()]
    assert matches
    return {match[1]: match[2] for match in matches if match is not None}


def default(field: Field[Any]) -> Any:
    """Return a field's default as a TOML value, or MISSING."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if is_dataclass(value) and not isinstance(value, type):
        return {key: part for key, part in asdict(value).items() if part != 0.0}
    if isinstance(value, Enum):
        return value.name.lower()
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("heading", "kind"), TABLES.items(), ids=list(TABLES))
def test_every_key_is_described_with_its_default(heading: str, kind: type) -> None:
    described = rows(heading)
    names = {field: key for key, field in timed_keys(Event).items()} if kind is Event else {}
    known = {names.get(field.name, field.name): default(field) for field in fields(kind)}
    if kind in (Scenario, Service):  # keys with a table of their own are described there
        known = {key: value for key, value in known.items() if not isinstance(value, list | dict)}
    assert described.keys() == known.keys()
    for key, value in known.items():
        if described[key] == "–":
            assert value in (MISSING, None), key
        elif described[key] != "see below" and (kind, key) != (Service, "log"):
            assert tomllib.loads(f"it = {described[key].strip('`')}")["it"] == value, key


def test_scenario_of_the_page_is_readable() -> None:
    text = PAGE.partition("```toml\n")[2].partition("```")[0]
    assert [setup.name for setup in read_setups(text)] == [
        "producers do not wait",
        "the slow sink paces",
        "without the slow sink",
    ]
