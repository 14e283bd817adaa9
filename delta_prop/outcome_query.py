"""Asks what became of a dot, and how far an origin is: what is answered no failure of the log takes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.refusals import may_have_happened
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.pipeline import Chain
    from delta_prop.published import Published
    from delta_prop.receipt import Receipt
    from delta_prop_wire.delta import Dot

_POLL_S = 0.05
"""How often it looks whether a failed log is recovered."""
_LOOK_ROWS, _LOOK_BYTES = 1_000, 1 << 20


async def outcome_of(chain: Chain, dot: Dot, timeout_s: float) -> int | ErrorCode | None:
    """Return the offset of the delta with this dot; None if it has not happened.

    Returns the code if the dot is void: that of the refusal, DOT_REUSED if its producer left the counter out,
    OUTCOME_UNKNOWN if the log no longer tells. Waits for a recovery of the log, and until what it returns is
    kept. Raises Refused: OUTCOME_UNKNOWN after `timeout_s`, LOG_FAILED if the log has stopped for good.
    """
    with anyio.move_on_after(timeout_s):
        while True:
            await until_running(chain)
            outcome = _look_up(chain, dot)
            if await _is_kept(chain):
                return outcome
    raise may_have_happened(f"the log was not recovered within {timeout_s} s", dot, retry_after_ms=1000)


def kept_watermark(chain: Chain, origin: int) -> int:
    """Return the counter up to which an origin's deltas are dealt with and what came of them is kept.

    Raises Refused (LOG_FAILED).
    """
    watermark, log = chain.watermark(origin), chain.log
    at = log.reached(log.level)
    while batches := log.read_appended(at, rows_max=_LOOK_ROWS, bytes_max=_LOOK_BYTES):
        for logged in batches:
            if logged.batch.origin == origin:
                return logged.batch.previous if logged.batch.leaps else logged.batch.base - 1
        at = batches[-1].next_offset
    return watermark


async def settled(receipt: Receipt, timeout_s: float) -> Published:
    """Wait for an outcome, and withdraw nothing. Raises TimeoutError, Refused."""
    done = anyio.Event()
    receipt.when_done(lambda _: done.set())
    try:
        with anyio.fail_after(timeout_s):
            await done.wait()
    except TimeoutError:
        state = receipt.state.value
        raise TimeoutError(f"its outcome is not known within {timeout_s} s: it is {state}") from None
    return receipt.result()


async def until_running(chain: Chain) -> None:
    """Wait until a log that has failed is recovered. Raises Refused (LOG_FAILED) if it never will be."""
    while chain.stopped is not None:
        if chain.stopped.retry_after_ms is None:
            chain.check_running()
        await anyio.sleep(_POLL_S)


def _look_up(chain: Chain, dot: Dot) -> int | ErrorCode | None:
    if chain.watermark(dot.origin) < dot.counter:
        return None
    outcome = chain.outcome(dot.origin, dot.counter)
    return ErrorCode.OUTCOME_UNKNOWN if outcome is None else outcome


async def _is_kept(chain: Chain) -> bool:
    """Wait until all that the state counts now is kept; False if the log fails first."""
    decided, failures = anyio.Event(), list[Refused]()

    def tell(failure: Refused | None) -> None:
        if failure is not None:
            failures.append(failure)
        decided.set()

    chain.when_kept(tell)
    await decided.wait()
    return not failures
