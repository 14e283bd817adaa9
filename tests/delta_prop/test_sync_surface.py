"""The plain calls have what the async ones have: the two are held against each other, name by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from delta_prop import Propagator, SyncPropagator

PAGE = Path(__file__).parents[2] / "docs" / "running.md"

MISSING = {
    "internals": "the parts that a server talks to; not for programs that embed a propagator",
    "__init__(world=)": "a world belongs to an event loop, which here is made by `open`",
}
"""Members `SyncPropagator` lacks, and why."""
OWN = {
    "open": "a notebook has no block that lasts for several cells",
    "close": "the end of what `open` began",
    "call": "runs a function on the loop, such as a sink's own method",
    "publish_as": "a producer's `publish` is async",
    "__init__(backend=)": "whoever runs an event loop chooses its backend",
}
"""Added by `SyncPropagator`, and why."""
ITERATORS = {
    "subscribe": ("Subscription", "Iterator[Delivered]"),
    "pressure_changes": ("AsyncGenerator[Pressure, None]", "Iterator[Pressure]"),
}


def names(kind: type) -> set[str]:
    """The public attributes of a class, and the parameters of its construction."""
    made_with = set(inspect.signature(kind).parameters)
    made_with = {f"__init__({name}=)" for name in made_with}
    found = {name for name in dir(kind) if not name.startswith("_")}
    if kind is Propagator:  # set in __init__
        found |= {"settings", "recovery"}
    return found | made_with


def shape(kind: type, name: str) -> dict[str, Any]:
    """The parameters of a method, and what it returns."""
    signature = inspect.signature(getattr(kind, name))
    shown = {str(one) for one in signature.parameters.values()}
    return {"parameters": shown, "returns": signature.return_annotation}


def test_both_have_the_same_but_for_what_is_said_here() -> None:
    assert names(Propagator) - names(SyncPropagator) == set(MISSING)
    assert names(SyncPropagator) - names(Propagator) == set(OWN)


METHODS = sorted(
    name for name in names(Propagator) - set(MISSING) if callable(getattr(Propagator, name, None))
)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_takes_and_gives_the_same(name: str) -> None:
    ours, theirs = shape(SyncPropagator, name), shape(Propagator, name)
    assert ours["parameters"] == theirs["parameters"]
    assert (theirs["returns"], ours["returns"]) == ITERATORS.get(name, (theirs["returns"],) * 2)


def test_the_page_names_what_differs() -> None:
    text = PAGE.read_text()
    for name in (*MISSING, *OWN):
        word = name.removeprefix("__init__(").removesuffix(")")
        assert re.search(rf"`{word}[`(]", text), name
