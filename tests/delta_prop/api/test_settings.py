"""Settings: each limit and each relation between limits is checked; the memory limit is the sum of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from delta_prop.api.settings import MIB, Settings
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import DELTA_BYTES_MAX


@pytest.mark.parametrize("name", [field_.name for field_ in fields(Settings)])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_settings_not_above_zero_are_rejected(name: str, value: Any) -> None:
    if name in ("linger_ms", "retries") and value == 0:
        assert getattr(Settings(**{name: 0}), name) == 0  # no linger and no retries are valid
        return
    with pytest.raises(UsageError, match=f"{name} = "):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"queue_high_mark": 0.4}, "give two fractions"),
        ({"queue_high_mark": 1.1}, "<= 1"),
        ({"queue_bytes_max": DELTA_BYTES_MAX - 1}, "give at least that many"),
        ({"pending_bytes_max": 5}, "give at least that many"),
        ({"mailbox_bytes_max": 5}, "give at least that many"),
        ({"quarantine_bytes_max": 5}, "give at least that many"),
        ({"pacing_low_mark": 0.9}, "give two fractions"),
        ({"pacing_high_mark": 1.0}, "< 1"),
        ({"retry_backoff_s": 6.0}, "raise the maximum"),
        ({"rate_min": 20_000.0}, "rate_initial 10000.0"),
        ({"rate_law": "guess"}, "drain, depth"),
        ({"queue_deltas_max": "many"}, "give a number"),
        ({"log_bytes_max": MIB}, "a frame may have"),
        ({"batch_deltas": 2_000}, "merge_deltas_max 1000: below batch_deltas 2000"),
    ],
)
def test_settings_out_of_range_or_in_conflict_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**values)


def test_memory_bytes_max_grows_with_every_memory_limit() -> None:
    settings = Settings()
    bound = settings.memory_bytes_max(4)
    print(f"worst case with four sinks: {bound / MIB:,.0f} MiB")
    assert bound < 4096 * MIB
    bytes_per_sink = settings.memory_bytes_max(5) - bound
    assert bytes_per_sink > settings.mailbox_bytes_max + settings.quarantine_bytes_max
    assert bytes_per_sink < 1.2 * (settings.mailbox_bytes_max + settings.quarantine_bytes_max)
    for name in (
        "queue_bytes_max",
        "pending_bytes_max",
        "pending_deltas_max",
        "log_bytes_max",
        "ids_per_generation",
        "id_generations_max",
        "heads_max",
        "origins_max",
    ):
        assert Settings(**{name: 2 * getattr(settings, name)}).memory_bytes_max(4) > bound, name
