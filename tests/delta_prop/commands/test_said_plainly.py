"""What the command says of a mistake: what is wrong with it, and a cure that is one."""

from __future__ import annotations

import pytest

from delta_prop.commands.places import parse_at
from delta_prop_wire.errors import UsageError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-13-41", "is no time, month must be in 1..12: give earliest"),
        ("2026-02-30", "is no time, day is out of range for month: give "),
        ("9999999999d", "is too long a time"),
        ("99999999999999d", "is too long a time"),
        ("monday", "'monday': give earliest"),
    ],
)
def test_what_is_wrong_with_a_time_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_at("--start", text, 0)
    assert said in str(caught.value)
