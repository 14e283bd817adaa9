"""Queries of a dot's outcome and of an origin's watermark, whose answers no failure of the log can revoke."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.calls.refusals import may_have_happened
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.calls.receipt import Receipt
    from delta_prop.partition.pipeline import Pipeline

_POLL_S = 0.05
"""Seconds between two checks of whether a failed log was recovered."""
_READ_ROWS, _READ_BYTES = 1_000, 1 << 20


async def find_outcome(pipeline: Pipeline, dot: Dot, timeout_s: float) -> int | ErrorCode | None:
    """Return the offset of the delta with this dot; None if it was not appended.

    Returns the code if the dot is a no-op: that of the refusal, DOT_REUSED if its producer left the counter
    out, OUTCOME_UNKNOWN if the log no longer holds it. Waits for a recovery of the log, and until what it
    returns is stored. Raises Refused: OUTCOME_UNKNOWN after `timeout_s`, LOG_FAILED if the log has stopped
    for good.
    """
    with anyio.move_on_after(timeout_s):
        while True:
            await wait_running(pipeline)
            outcome = _find_now(pipeline, dot)
            if await _wait_stored(pipeline):
                return outcome
    raise may_have_happened(f"the log was not recovered within {timeout_s} s", dot, retry_after_ms=1000)


def stored_watermark(pipeline: Pipeline, origin: int) -> int:
    """Return the counter up to which an origin's deltas are processed and their outcomes stored.

    Raises Refused (LOG_FAILED).
    """
    watermark, log = pipeline.watermark(origin), pipeline.log
    offset = log.offset_at_level(log.ack_level)
    while batches := log.read_appended(offset, rows_max=_READ_ROWS, bytes_max=_READ_BYTES):
        for logged in batches:
            if logged.batch.origin == origin:
                return logged.batch.previous if logged.batch.has_gaps else logged.batch.base - 1
        offset = batches[-1].next_offset
    return watermark


async def wait_settled(receipt: Receipt, timeout_s: float) -> PublishAck:
    """Wait for an outcome without withdrawing the delta. Raises TimeoutError, Refused."""
    done = anyio.Event()
    receipt.add_done_callback(lambda _: done.set())
    try:
        with anyio.fail_after(timeout_s):
            await done.wait()
    except TimeoutError:
        state = receipt.state.value
        raise TimeoutError(f"the delta has no outcome after {timeout_s} s: it is {state}") from None
    return receipt.result()


async def wait_running(pipeline: Pipeline) -> None:
    """Wait until a failed log is recovered. Raises Refused (LOG_FAILED) if it never will be."""
    while pipeline.stop_refusal is not None:
        if pipeline.stop_refusal.retry_after_ms is None:
            pipeline.check_running()
        await anyio.sleep(_POLL_S)


def _find_now(pipeline: Pipeline, dot: Dot) -> int | ErrorCode | None:
    if pipeline.watermark(dot.origin) < dot.counter:
        return None
    outcome = pipeline.outcome(dot.origin, dot.counter)
    return ErrorCode.OUTCOME_UNKNOWN if outcome is None else outcome


async def _wait_stored(pipeline: Pipeline) -> bool:
    """Wait until everything in the current state is stored; False if the log fails first."""
    decided, failures = anyio.Event(), list[Refused]()

    def on_outcome(failure: Refused | None) -> None:
        if failure is not None:
            failures.append(failure)
        decided.set()

    pipeline.when_reached(on_outcome)
    await decided.wait()
    return not failures
