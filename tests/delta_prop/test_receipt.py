"""Receipts: settled once, and exact about what a cancelled wait leaves behind."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.receipt import OfferState, PublishAck, Receipt
from delta_prop_wire.delta import AckLevel, Dot
from delta_prop_wire.errors import UsageError

HAPPENED = PublishAck(7, Dot(16, 1), 1, AckLevel.MEMORY)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("happens", [True, False])
def test_a_wait_cancelled_in_the_tick_of_the_acknowledgement_says_that_it_happened(
    backend: str, happens: bool
) -> None:
    async def main() -> tuple[list[PublishAck], OfferState]:
        receipt, told = Receipt(), list[PublishAck]()
        receipt.mark_waiting(OfferState.QUEUED, lambda: True)

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                told.append(await receipt.wait())

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            if happens:
                receipt.acknowledge(HAPPENED)
        return told, receipt.state

    told, state = anyio.run(main, backend=backend)
    if happens:
        assert (told, state) == ([HAPPENED], OfferState.ACKNOWLEDGED)
    else:
        assert (told, state) == ([], OfferState.WITHDRAWN)


def test_a_receipt_without_an_outcome_says_so() -> None:
    with pytest.raises(UsageError, match="queued"):
        Receipt().result()


def test_what_cannot_be_taken_back_goes_on() -> None:
    receipt = Receipt()
    receipt.mark_waiting(OfferState.PENDING, lambda: False)
    assert not receipt.withdraw()
    assert receipt.state is OfferState.PENDING
    receipt.acknowledge(HAPPENED)
    assert receipt.result() == HAPPENED
    assert not receipt.withdraw()
