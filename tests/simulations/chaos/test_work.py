"""The bound on folds in one call of an index, relative to the deltas of the vectors that it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.sinks import IndexSink
from delta_prop_simulations.chaos.sinks import REFOLDS_MAX, CountedIndex
from delta_prop_sinks.sink import Delivery
from tests.simulations.chaos.synthetic_histories import B, batch, delta_of, log_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.chaos.violation import Violation

ROWS = 4


@pytest.mark.parametrize("by_apply_now", [True, False])
@pytest.mark.parametrize(
    ("folded_count", "is_allowed"), [(0, True), (REFOLDS_MAX * ROWS, True), (REFOLDS_MAX * ROWS + 1, False)]
)
def test_call_may_fold_each_delta_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, folded_count: int, is_allowed: bool, by_apply_now: bool
) -> None:
    log = log_of(
        batch(1, *(delta_of(f"t{number}") for number in range(ROWS - 1))),
        batch(1, delta_of("late"), delta_of("other", key="w"), origin=B),
        lost=[batch(9, delta_of("lost", key="w"))],
    )
    violations: list[Violation] = []
    index = CountedIndex("i", log, violations)
    refolded_count = 7

    async def apply(_self: object, _deliveries: object) -> None:
        nonlocal refolded_count
        refolded_count += folded_count

    def apply_now(_self: object, _deliveries: object) -> bool:
        nonlocal refolded_count
        refolded_count += folded_count
        return True

    monkeypatch.setattr(IndexSink, "apply", apply)
    monkeypatch.setattr(IndexSink, "apply_now", apply_now)
    monkeypatch.setattr(index, "_count_refolded", lambda: refolded_count)
    deliveries: Sequence[Any] = [Delivery(log.batches[0])]
    if by_apply_now:
        assert index.apply_now(deliveries)
    else:
        anyio.run(index.apply, deliveries)
    assert [violation.check for violation in violations] == ([] if is_allowed else ["work"])
