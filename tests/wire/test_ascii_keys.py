"""Names that are laid out together are as each by itself would be; what is no plain name is left alone."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.ascii_keys import pack_ascii_keys
from delta_prop_wire.bounds import name_is_valid

PLAIN = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=8)
ANY = st.one_of(PLAIN, PLAIN, st.sampled_from(["", "é", "\n", "a\nb", "\x7f", "x" * 9, "\x1f"]))


@given(st.lists(ANY, min_size=1, max_size=4), st.sampled_from([1, 30, 70]))
def test_names_are_laid_out_as_one_by_one(names: list[str], times: int) -> None:
    names = names * times
    plain = all(name_is_valid(name, 8) and name.isascii() for name in names)
    found = pack_ascii_keys(names, 8)
    assert (found is not None) is plain
    if found is not None:
        texts, ends = found
        assert texts == "".join(names).encode()
        assert np.frombuffer(ends, "<u4").tolist() == list(accumulate(map(len, names)))


@pytest.mark.parametrize("names", [[], ["a", 1], ["a", b"b"], [None]])
def test_what_is_no_name_is_left_alone(names: list[object]) -> None:
    assert pack_ascii_keys(names, 8) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 40, 99])
@pytest.mark.parametrize("bad", ["", "x" * 9, "\n", "a\n", "\x00"])
def test_one_among_many_is_seen_wherever_it_stands(at: int, bad: str) -> None:
    names = ["a name"] * 100
    assert pack_ascii_keys(names, 8) is not None
    names[at] = bad
    assert pack_ascii_keys(names, 8) is None
