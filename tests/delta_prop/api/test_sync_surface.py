"""Propagator and SyncPropagator have the same methods and signatures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from delta_prop import Propagator, SyncPropagator

PAGE = Path(__file__).parents[3] / "docs" / "running.md"

MISSING = {
    "internals": "the parts that a server talks to; not for programs that embed a propagator",
    "__init__(world=)": "a world belongs to an event loop, and `open` makes the loop",
}
"""Members that `SyncPropagator` lacks, with the reason."""
ADDED = {
    "open": "a notebook has no block that lasts for several cells",
    "close": "ends what `open` started",
    "call": "runs a function on the loop, such as a sink's own method",
    "publish_as": "a producer's `publish` is async",
    "__init__(backend=)": "`SyncPropagator` runs the event loop itself, so it chooses the backend",
}
"""Members that only `SyncPropagator` has, with the reason."""
ITERATORS = {
    "subscribe": ("Subscription", "Iterator[Delivered]"),
    "pressure_changes": ("AsyncGenerator[Pressure, None]", "Iterator[Pressure]"),
}
"""Methods that return an iterator without `await`: the return types, of `Propagator` first."""
OWN_DOCSTRINGS = {
    "subscribe": "its iterator is a plain one",
    "pressure_changes": "its iterator is a plain one",
    "settings": "an attribute of `Propagator`, without a docstring",
}
"""Members whose docstring does not begin as that of `Propagator`, with the reason."""


def public_names(kind: type) -> set[str]:
    """Return the public attributes of a class, and the parameters of its constructor."""
    parameters = set(inspect.signature(kind).parameters)
    parameters = {f"__init__({name}=)" for name in parameters}
    names = {name for name in dir(kind) if not name.startswith("_")}
    if kind is Propagator:  # these attributes are set in __init__
        names |= {"settings", "recovery"}
    return names | parameters


def method_signature(kind: type, name: str) -> dict[str, Any]:
    """Return the parameters of a method, and its return type."""
    signature = inspect.signature(getattr(kind, name))
    parameters = [str(parameter) for parameter in signature.parameters.values()]
    return {"parameters": parameters, "returns": signature.return_annotation}


def test_classes_differ_only_in_listed_names() -> None:
    assert public_names(Propagator) - public_names(SyncPropagator) == set(MISSING)
    assert public_names(SyncPropagator) - public_names(Propagator) == set(ADDED)


METHODS = sorted(
    name for name in public_names(Propagator) - set(MISSING) if callable(getattr(Propagator, name, None))
)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_the_same_signature(name: str) -> None:
    sync_signature, async_signature = (
        method_signature(SyncPropagator, name),
        method_signature(Propagator, name),
    )
    assert sync_signature["parameters"] == async_signature["parameters"]
    assert (async_signature["returns"], sync_signature["returns"]) == ITERATORS.get(
        name, (async_signature["returns"],) * 2
    )


def first_sentence(kind: type, name: str) -> str | None:
    """Return the first sentence of a member's docstring."""
    docstring = inspect.getdoc(getattr(kind, name, None))
    return None if docstring is None else re.split(r"[.;:]\s|\.$", docstring, maxsplit=1)[0]


def test_each_docstring_has_the_same_first_sentence() -> None:
    shared = public_names(Propagator) & public_names(SyncPropagator)
    differing = {
        name
        for name in shared
        if not name.startswith("__init__")
        and first_sentence(Propagator, name) != first_sentence(SyncPropagator, name)
    }
    assert differing == set(OWN_DOCSTRINGS)


def test_page_names_every_difference() -> None:
    text = PAGE.read_text()
    for name in (*MISSING, *ADDED):
        word = name.removeprefix("__init__(").removesuffix(")")
        assert re.search(rf"`{word}[`(]", text), name
