"""The one decision of a producer about each code, and about a service that does not answer."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.client.errors import Reconnect
from delta_prop.client.producer import Producer
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Nack
from delta_prop_wire.spec import FINAL, RETRYABLE, ErrorCode
from tests.delta_prop.client.test_producer_state import Wire, make_delta
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service

RESENDS, SAYS_HELLO, REFUSES_CALL, STOPS = "resends", "says hello", "refuses the call", "stops"
DECISIONS = {
    # The same frame, later.
    RESENDS: "QUEUE_FULL RATE_LIMITED SHUTTING_DOWN PENDING_FULL LOG_FULL LOG_FAILED OVERLAP NOT_LEADER "
    "NO_QUORUM WRONG_PARTITION UNKNOWN_STREAM STALE_GENERATION STREAM_MOVED QUOTA_EXCEEDED",
    # The answer shows which counters are processed: a gap, or an origin that the service has forgotten.
    SAYS_HELLO: "DEP_TIMEOUT UNKNOWN_ORIGIN",
    # The calls after it proceed.
    REFUSES_CALL: "TOO_LARGE UNAUTHORIZED INVALID_DELTA CONFLICT LEVEL_UNAVAILABLE ID_REUSED OUTCOME_UNKNOWN",
    # No repetition helps: another writer has the name, or a client is defective.
    STOPS: "FENCED DOT_REUSED BAD_FRAME UNSUPPORTED_VERSION UNSUPPORTED_FLAG CHECKSUM UNKNOWN_TOPIC "
    "CURSOR_TOO_OLD PROCESSING_FAILED BAD_REQUEST UNKNOWN_JOB JOB_DECIDED CODE_999",
}
DECISION_BY_NAME = {name: decision for decision, names in DECISIONS.items() for name in names.split()}
HELLO_RECONNECTS = (RETRYABLE - {ErrorCode.UNKNOWN_STREAM}) | {ErrorCode.CHECKSUM}
"""Codes of a refused hello, or of an ended connection, after which a client connects again."""


def decide(code: ErrorCode) -> str:
    """Return what a producer does about a refused batch of one call, before another call."""
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.send()
    (sent,) = wire.in_transit
    wire.in_transit.clear()
    wire.offer(make_delta("b"))
    try:
        wire.producer_state.on_nack(Nack(1, code, "no"), 0.0)
    except Reconnect:
        assert not wire.outcomes
        return SAYS_HELLO
    except Refused as refused:
        wire.producer_state.fail(refused)
        assert [outcome.code for outcome in wire.outcomes.values()] == [code, code]  # type: ignore[union-attr]
        return STOPS
    first = wire.producer_state.next_frame(60.0)
    assert first is not None
    if wire.outcomes:
        outcome = wire.outcomes[0]
        assert isinstance(outcome, Refused)
        assert outcome.code is code
        assert first.batch.keys == ["b"]
        return REFUSES_CALL
    assert bytes(first.batch.body) == bytes(sent.batch.body), "the same dot, and the same bytes"
    # A service without capacity gets this batch alone, until it answers or 5 s have passed.
    following = wire.producer_state.next_frame(66.0)
    assert following is not None
    assert following.batch.keys == ["b"], "nothing overtakes the batch"
    return RESENDS


@pytest.mark.parametrize("code", [*ErrorCode, ErrorCode(999)], ids=lambda code: code.name)
def test_each_code_has_one_decision(code: ErrorCode) -> None:
    assert decide(code) == DECISION_BY_NAME[code.name]


def test_decisions_name_each_code_once() -> None:
    names = " ".join(DECISIONS.values()).split()
    assert sorted(names) == sorted([*(code.name for code in ErrorCode), "CODE_999"])


def test_no_code_is_both_final_and_retryable() -> None:
    assert not FINAL & RETRYABLE
    for code in ErrorCode:
        refusal = Refused(code, "no")
        assert (refusal.retryable, refusal.is_final) == (code in RETRYABLE, code in FINAL)
        decision = DECISION_BY_NAME[code.name]
        if code in RETRYABLE:
            assert decision in (RESENDS, SAYS_HELLO)
        elif code is not ErrorCode.UNKNOWN_ORIGIN:
            assert decision in (REFUSES_CALL, STOPS)
        assert code not in FINAL or decision == REFUSES_CALL


@pytest.mark.parametrize("code", [*ErrorCode, ErrorCode(999)], ids=lambda code: code.name)
@pytest.mark.parametrize("is_answer", [True, False], ids=["hello refused", "connection ended"])
def test_refused_hello_reconnects_or_stops_by_its_code(code: ErrorCode, is_answer: bool) -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    nack = Nack(0, code, "no", 1_500, correlation_id=1 if is_answer else None)
    with pytest.raises((Reconnect, Refused)) as raised:
        wire.producer_state.on_nack(nack, 0.0)
    assert isinstance(raised.value, Reconnect) == (code in HELLO_RECONNECTS)
    if isinstance(raised.value, Reconnect) and code is not ErrorCode.CHECKSUM:
        assert raised.value.after_s == 1.5
    assert not wire.outcomes


# --- a service that does not answer


def producer(site: Site) -> Producer:
    return Producer(ADDRESS, name="orders", world=site.world)


def test_batch_without_an_answer_is_resent_once_the_service_counts_as_silent() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(Delta("a", opaque(b"a")))
            site.network.cut("server", "client")  # the service gets the batch; its answers get lost
            receipt = p.offer(Delta("b", opaque(b"b")))
            await anyio.sleep(14)
            assert (p.waits_for, site.keys()) == (None, ["a", "b"])
            await anyio.sleep(4)
            assert "silent for too long" in str(p.waits_for), "15 s without a frame end a connection"
            site.network.heal("server", "client")
            healed_at = anyio.current_time()
            ack = await receipt
            assert anyio.current_time() - healed_at <= 11
            assert (ack.offset, ack.duplicates) == (1, {}), "one effect, at the offset of the first copy"
            assert (p.reconnects, site.keys()) == (1, ["a", "b"])

    with_service(scenario)


@pytest.mark.parametrize("is_received", [True, False])
def test_publish_without_an_answer_ends_after_30_s_and_its_repetition_has_one_effect(
    is_received: bool,
) -> None:
    delta = Delta("b", opaque(b"b"), id=bytes(range(16)))
    path = ("server", "client") if is_received else ("client", "server")

    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(Delta("a", opaque(b"a")))
            site.network.cut(*path)
            began = anyio.current_time()
            with pytest.raises(Refused, match="may have happened") as refused:
                await p.publish(delta)
            assert 30 <= anyio.current_time() - began <= 31
            assert refused.value.retry_after_ms == 1_000
            site.network.heal(*path)
            assert (await p.publish(delta)).duplicate is is_received
            assert (await p.publish(delta)).duplicate
        assert site.keys() == ["a", "b"]

    with_service(scenario)
