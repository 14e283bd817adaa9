"""A receipt gets one outcome, and also a cancelled wait reports it correctly."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop_wire.delta import AckLevel, Dot
from delta_prop_wire.errors import UsageError

ACK = PublishAck(7, Dot(16, 1), 1, AckLevel.MEMORY)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("is_acked", [True, False])
def test_wait_cancelled_in_the_tick_of_the_ack_returns_the_ack(backend: str, is_acked: bool) -> None:
    async def main() -> tuple[list[PublishAck], OfferState]:
        receipt, acks = Receipt(), list[PublishAck]()
        receipt.mark_waiting(OfferState.QUEUED, lambda: True)

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                acks.append(await receipt.wait())

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            if is_acked:
                receipt.acknowledge(ACK)
        return acks, receipt.state

    acks, state = anyio.run(main, backend=backend)
    if is_acked:
        assert (acks, state) == ([ACK], OfferState.ACKNOWLEDGED)
    else:
        assert (acks, state) == ([], OfferState.WITHDRAWN)


def test_result_without_an_outcome_raises() -> None:
    with pytest.raises(UsageError, match="queued"):
        Receipt().result()


def test_refused_withdraw_leaves_receipt_pending() -> None:
    receipt = Receipt()
    receipt.mark_waiting(OfferState.PENDING, lambda: False)
    assert not receipt.withdraw()
    assert receipt.state is OfferState.PENDING
    receipt.acknowledge(ACK)
    assert receipt.result() == ACK
    assert not receipt.withdraw()
