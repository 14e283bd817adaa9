"""`Heartbeats`: those of the client are answered with its time, and carry progress both ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from delta_prop.server.consumer_session import Heartbeats
from delta_prop_wire.frames import Heartbeat
from tests.delta_prop.server.session_fakes import FixedClock

if TYPE_CHECKING:
    from delta_prop_wire.frames import Frame


class HeartbeatsFixture:
    def __init__(self, session: Any = None) -> None:
        self.sent: list[Frame] = []
        self.writer = SimpleNamespace(written_at=0.0)
        answers: Any = SimpleNamespace(send=self.sent.append, writer=self.writer)
        deliveries: Any = SimpleNamespace(session=session)
        self.heartbeats = Heartbeats(FixedClock(100.0), answers, deliveries)


def test_heartbeat_with_a_time_is_answered_with_it() -> None:
    fixture = HeartbeatsFixture()
    fixture.heartbeats.receive(Heartbeat(1, 77))
    assert fixture.sent == [Heartbeat(1, 100_000_000, 77)]
    assert fixture.writer.written_at == 100.0


def test_heartbeat_without_a_time_is_not_answered() -> None:
    fixture = HeartbeatsFixture()
    fixture.heartbeats.receive(Heartbeat(1, 77))
    fixture.heartbeats.receive(Heartbeat(2))
    assert len(fixture.sent) == 1
    fixture.heartbeats.send(101.5)
    assert fixture.sent[1:] == [Heartbeat(2, 101_500_000, None)], "an old time must not be echoed"


def test_heartbeats_carry_progress_both_ways() -> None:
    reported: list[int] = []
    session = SimpleNamespace(note_processed=reported.append, reported_offset=9)
    fixture = HeartbeatsFixture(session)
    fixture.heartbeats.receive(Heartbeat(1, processed=7))
    assert reported == [7]
    fixture.heartbeats.send(100.0)
    assert fixture.sent == [Heartbeat(1, 100_000_000, None, processed=9)]
