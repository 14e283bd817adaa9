"""JSON merge patches: the examples of RFC 7396, without changes in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.metadata import merge

NAMES = st.sampled_from("abc")
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.text("xy", max_size=2) | st.lists(st.none())
OBJECTS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)
)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": 1}, {"a": [None]}, {"a": [None]}),
        ({"a": 1}, {}, {"a": 1}),
    ],
)
def test_merge_follows_the_examples_of_the_rfc(
    target: dict[str, Any], patch: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merge(target, patch) == result


@given(OBJECTS, OBJECTS)
def test_merge_changes_neither_target_nor_patch(target: dict[str, Any], patch: dict[str, Any]) -> None:
    before = copy.deepcopy((target, patch))
    merge(target, patch)
    assert (target, patch) == before
