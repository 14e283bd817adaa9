"""Mutants are hunted seed by seed, and the table shows each result."""

from __future__ import annotations

import json

import pytest

from delta_prop_simulations.chaos.mutants.catalogue import MUTANTS
from delta_prop_simulations.commands import dispatch
from delta_prop_simulations.commands.mutants import (
    SEEDS_MAX,
    Hunt,
    format_table,
    hunt,
    join_hunts,
    select_mutants,
)
from delta_prop_wire.errors import UsageError

QUICK_SEEDS = 20
QUICK = ("ack-one-off", "credit-given-twice", "delivered-before-the-commit")
"""Mutants that a few seeds find."""


def test_mutants_are_found(full: bool) -> None:
    names = tuple(MUTANTS) if full else QUICK
    print(f"{len(names)} of {len(MUTANTS)} mutants hunted")
    for name in names:
        result = hunt(name, range(SEEDS_MAX if full else QUICK_SEEDS))
        assert result.is_found, format_table([result])
        assert result.reached


def test_joined_hunt_keeps_the_first_seed() -> None:
    parts = [
        Hunt(None, 25, 0),
        Hunt(None, 3, 0, 52, "lost", "a delta"),
        Hunt(None, 2, 0, 26, "state", "another"),
    ]
    assert join_hunts(parts) == Hunt(None, 30, 0, 26, "state", "another")
    assert join_hunts([Hunt(None, 25, 0), Hunt(None, 25, 0)]) == Hunt(None, 50, 0)


def test_table_shows_seed_and_violation_or_not_found() -> None:
    lines = format_table(
        [
            Hunt(None, 500, 0),
            Hunt("ack-one-off", 3, 2, 2, "answer", "offset 7 was reported as 8"),
            Hunt("feed-not-notified", 500, 480),
            Hunt("group-not-fenced", 500, 0),
        ]
    )
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "0 of 500 seeds break a promise",
        "seed 2: offset 7 was reported as 8",
        "not found; 480 seeds ran its code",
        "never reached",
    ]


def test_mutants_are_selected_in_order_of_the_table() -> None:
    first, second = list(MUTANTS)[:2]
    assert select_mutants([second, first]) == [first, second]
    assert select_mutants([]) == list(MUTANTS)
    with pytest.raises(UsageError, match="unknown mutant"):
        select_mutants(["harmless"])


def test_command_prints_hunts_and_fails_if_mutant_not_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dispatch("mutants", ["ack-one-off", "--seeds", "0", "--jobs", "1", "--json"]) == 1
    hunts = json.loads(capsys.readouterr().out)
    assert [hunt_record["mutant"] for hunt_record in hunts] == [None, "ack-one-off"]
    assert hunts[1]["tried"] == 0
    assert dispatch("mutants", ["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS)
