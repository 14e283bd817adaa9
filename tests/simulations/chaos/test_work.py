"""The bound on folds in one call of an index, relative to the deltas of the vectors that it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.sinks import IndexSink
from delta_prop_simulations.chaos.work import REFOLDS_MAX, CountedIndex
from delta_prop_sinks.sink import Delivery
from tests.simulations.chaos.synthetic_histories import B, batch, log_of, one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.chaos.violation import Violation

ROWS = 4


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize(
    ("folded", "is_allowed"), [(0, True), (REFOLDS_MAX * ROWS, True), (REFOLDS_MAX * ROWS + 1, False)]
)
def test_call_may_fold_each_delta_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, folded: int, is_allowed: bool, now: bool
) -> None:
    log = log_of(
        batch(1, *(one(f"t{at}") for at in range(ROWS - 1))),
        batch(1, one("late"), one("other", key="w"), origin=B),
        lost=[batch(9, one("lost", key="w"))],
    )
    complaints: list[Violation] = []
    index = CountedIndex("i", log, complaints.append)
    done = 7

    async def apply(_self: object, _deliveries: object) -> None:
        nonlocal done
        done += folded

    def apply_now(_self: object, _deliveries: object) -> bool:
        nonlocal done
        done += folded
        return True

    monkeypatch.setattr(IndexSink, "apply", apply)
    monkeypatch.setattr(IndexSink, "apply_now", apply_now)
    monkeypatch.setattr(index, "_count_refolded", lambda: done)
    deliveries: Sequence[Any] = [Delivery(log.batches[0])]
    if now:
        assert index.apply_now(deliveries)
    else:
        anyio.run(index.apply, deliveries)
    assert [one.check for one in complaints] == ([] if is_allowed else ["work"])
