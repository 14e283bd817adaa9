"""`pack_keys`: keys packed together equal keys encoded one by one; other keys are not packed."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.bounds import name_is_valid
from tests.native_core import NativeCore, needs_native_core

pytestmark = needs_native_core
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=8)
KEYS = st.one_of(PRINTABLE, PRINTABLE, st.sampled_from(["", "é", "\n", "a\nb", "\x7f", "x" * 9, "\x1f"]))


@given(st.lists(KEYS, min_size=1, max_size=4), st.sampled_from([1, 30, 70]))
def test_ascii_keys_are_packed_with_their_ends(names: list[str], repetitions: int) -> None:
    names = names * repetitions
    are_ascii = all(name_is_valid(name, 8) and name.isascii() for name in names)
    packed = NativeCore().pack_keys(names, 8)
    assert (packed is not None) is are_ascii
    if packed is not None:
        texts, ends = packed
        assert texts == "".join(names).encode()
        assert np.frombuffer(ends, "<u4").tolist() == list(accumulate(map(len, names)))


@pytest.mark.parametrize("names", [[], ["a", 1], ["a", b"b"], [None]])
def test_invalid_keys_are_not_packed(names: list[object]) -> None:
    assert NativeCore().pack_keys(names, 8) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [0, 40, 99])
@pytest.mark.parametrize("invalid_key", ["", "x" * 9, "\n", "a\n", "\x00"])
def test_one_invalid_key_among_many_is_found(position: int, invalid_key: str) -> None:
    names = ["a name"] * 100
    assert NativeCore().pack_keys(names, 8) is not None
    names[position] = invalid_key
    assert NativeCore().pack_keys(names, 8) is None
