"""`OutcomeCollector`: outcomes are reported once, in order, with the credit of their frames."""

from __future__ import annotations

import logging

import pytest

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.refusals import KnownOutcome
from delta_prop.server.answers import ConnectedClient, RefusalLog
from delta_prop.server.audit import Audit
from delta_prop.server.outcome_collector import RANGES_MAX, OutcomeCollector
from delta_prop.server.permissions import Permissions
from delta_prop.server.server_context import Counters
from delta_prop_wire.delta import AckLevel, Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, AckRange, Credit, Nack
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.session_fakes import FixedClock, rows_batch


class Collected:
    """A collector, with what it notifies and counts."""

    def __init__(self) -> None:
        self.notifications = 0
        self.counters = Counters()
        self.audit = Audit(FixedClock())
        client = ConnectedClient(1, "10.0.0.7:1", permissions=Permissions("ci"))
        self.collector = OutcomeCollector(self, self.counters, RefusalLog(client, self.counters, self.audit))

    def notify(self) -> None:
        self.notifications += 1


def acked(offset: int, count: int = 1) -> PublishAck:
    return PublishAck(offset, Dot(16, offset + 1), count, AckLevel.MEMORY)


def test_neighbouring_outcomes_share_a_range_and_an_ack() -> None:
    collected = Collected()
    collector = collected.collector
    entries = [collector.open(1 + 2 * index, 2, 100, is_ack_wanted=True) for index in range(3)]
    entries[0].acknowledge(acked(10, 2))
    entries[1].acknowledge(acked(12, 2))
    assert collector.has_answers
    assert collected.notifications == 2
    assert collector.take_answers(throttled=False) == [
        Ack(4, ranges=(AckRange(1, 4, 10),), credit=Credit(4, 200))
    ]
    assert not collector.has_answers
    entries[2].acknowledge(acked(20, 2))
    assert collector.take_answers(throttled=False) == [
        Ack(6, ranges=(AckRange(5, 6, 20),), credit=Credit(2, 100))
    ]


def test_sequence_waits_for_earlier_frames() -> None:
    collector = Collected().collector
    first, second = (collector.open(number, 1, 10, is_ack_wanted=True) for number in (1, 2))
    second.acknowledge(acked(5))
    assert collector.take_answers(throttled=False) == [
        Ack(0, ranges=(AckRange(2, 2, 5),), credit=Credit(1, 10))
    ]
    first.acknowledge(acked(6))
    (ack,) = collector.take_answers(throttled=False)
    assert ack.sequence == 2


def test_throttled_collector_owes_the_credit() -> None:
    collector = Collected().collector
    collector.open(1, 3, 50, is_ack_wanted=False).acknowledge(acked(0, 3))
    assert collector.take_answers(throttled=True) == [Ack(3)]
    assert collector.has_answers, "the credit is still to be returned"
    assert (collector.owed_deltas, collector.owed_bytes) == (3, 50)
    assert collector.take_answers(throttled=False) == [Ack(3, credit=Credit(3, 50))]
    assert (collector.owed_deltas, collector.owed_bytes) == (0, 0)


def test_refusals_come_first_and_hide_why_a_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "delta_prop.audit")
    collected = Collected()
    collector = collected.collector
    first, second, third = (collector.open(number, 1, 10, is_ack_wanted=True) for number in (1, 2, 3))
    first.acknowledge(acked(5))
    second.refuse(Refused(ErrorCode.UNAUTHORIZED, "the token may not publish to namespace 'secret'"))
    third.refuse(KnownOutcome(ErrorCode.INVALID_DELTA, "refused before"))
    nack, known, ack = collector.take_answers(throttled=False)
    assert isinstance(nack, Nack)
    assert (nack.sequence, nack.code, nack.text) == (2, ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
    assert isinstance(known, Nack)
    assert known.sequence == 3
    assert ack.sequence == 3
    assert collector.is_unauthorized
    assert collected.counters.nacks == {"UNAUTHORIZED": 1, "INVALID_DELTA": 1}
    assert collected.audit.refusals == 1, "the outcome of an earlier delta was audited with that delta"
    assert "secret" in str([record.__dict__ for record in caplog.records])


def test_split_run_reports_each_of_its_frames() -> None:
    collector = Collected().collector
    batches = [rows_batch(2, 1), rows_batch(3, 3)]
    run = collector.open(1, 5, sum(batch.size for batch in batches), is_ack_wanted=True)
    run.batches = batches
    later = collector.open(6, 1, 10, is_ack_wanted=True)
    first, second = run.split([2, 3])
    assert list(collector.pending) == [first, second, later]
    second.refuse(Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=1))
    first.acknowledge(acked(7, 2))
    nack, ack = collector.take_answers(throttled=False)
    assert (nack.sequence, ack.sequence) == (3, 5)
    assert collector.owed_bytes == 0
    assert list(collector.pending) == [later]


def test_ranges_beyond_the_maximum_go_into_further_acks() -> None:
    collector = Collected().collector
    for number in range(1, RANGES_MAX + 2):
        collector.open(number, 1, 1, is_ack_wanted=True).acknowledge(acked(3 * number))
    first, last = collector.take_answers(throttled=False)
    assert isinstance(first, Ack)
    assert isinstance(last, Ack)
    assert (first.sequence, len(first.ranges)) == (0, RANGES_MAX)
    assert (last.sequence, len(last.ranges)) == (RANGES_MAX + 1, 1)


def test_closed_collector_notifies_nobody() -> None:
    collected = Collected()
    entry = collected.collector.open(1, 1, 1, is_ack_wanted=True)
    collected.collector.close()
    entry.acknowledge(acked(0))
    assert collected.notifications == 0
