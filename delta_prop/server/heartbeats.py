"""The heartbeats of one connection: each side's are answered at once, and measure the way there and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.frames import Heartbeat

if TYPE_CHECKING:
    from delta_prop.platform.ports import Clock
    from delta_prop.server.answers import Answers
    from delta_prop.server.consume_handler import ConsumeHandler


class Heartbeats:
    """Sends and receives heartbeats; with them, the progress of deliveries."""

    def __init__(self, clock: Clock, answers: Answers, deliveries: ConsumeHandler) -> None:
        self._clock = clock
        self._answers = answers
        self._deliveries = deliveries
        self._count = 0
        self._echo_us: int | None = None  # the time in the client's last heartbeat

    def receive(self, frame: Heartbeat) -> None:
        """Answer a heartbeat of the client that asks for it, and note what the client has processed."""
        self._echo_us = frame.sent_us
        if frame.sent_us is not None:
            self.send(self._clock.now())
        session = self._deliveries.session
        if frame.processed is not None and session is not None:
            session.note_processed(frame.processed)

    def send(self, now: float) -> None:
        """Send a heartbeat."""
        self._count += 1
        session = self._deliveries.session
        processed = None if session is None else session.reported_offset
        self._answers.send(Heartbeat(self._count, int(now * 1_000_000), self._echo_us, processed=processed))
        self._answers.writer.written_at = now
