"""A producer's side of a connection, without the transport: makes the frames to send, handles the others.

Pure. The asynchronous and the blocking producer both wrap this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delta_prop.client.producer_state import ProducerState
from delta_prop_wire.codec import encode_head
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Ack, Backpressure, Frame, Hello, JobPart, Nack, Welcome

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.client.service_identity import RequestedLevel
    from delta_prop.client.session import Session

SEND_BYTES_MAX = 256 * 1024
"""Bytes after which `data_to_send` returns; it may exceed them by one batch."""
SPLIT_SEND_BYTES_MIN = 64 * 1024
"""From this size on, a batch is sent in two pieces."""
JOBS_FEATURE = "jobs"
"""The feature of a service that can stage the parts of a job."""


def check_staging(welcome: Welcome) -> None:
    """Raise UsageError if the service has no jobs: it would append the deltas instead of staging them."""
    if JOBS_FEATURE not in welcome.features:
        raise UsageError(
            "the service has no jobs: keep its log in a directory and update its program, or send without "
            "a job"
        )


class JitterSource(Protocol):
    """Source of numbers from 0 (inclusive) to 1 (exclusive)."""

    def random(self) -> float:
        """Return the next number."""
        ...


class ProducerProtocol:
    """Makes and handles the frames of a `ProducerState`. Implements `LinkProtocol`."""

    def __init__(
        self,
        name: str,
        *,
        token: str | None,
        source: Source,
        ack_level: RequestedLevel,
        log_id: bytes | None = None,
        job: JobPart | None = None,
        priority: Priority = Priority.NORMAL,
        can_split: bool = False,
    ) -> None:
        """`job`: the part of a job for which deltas are staged, instead of published. `priority`: the
        priority whose origin the first hello claims. `can_split`: as in `ProducerState`.
        """
        if source is Source.REPLICA:
            raise UsageError("source replica: only a forwarding service sends it: give another one")
        self.state = ProducerState(
            name,
            ack_level=ack_level,
            log_id=log_id,
            priority=priority,
            can_split=can_split,
        )
        self._job = job
        self._was_welcomed = False  # a service has answered
        self.token = token
        self._source = source

    def begin(self, jitter: JitterSource) -> None:
        """Name the source of the jitter, before the first connection."""
        self._jitter = jitter

    def hello(self) -> Hello:
        """Return the hello that opens a connection."""
        return Hello(
            token=self.token,
            origins=self.state.claim_origins(),
            source=self._source,
            client=self.state.name[:60],
            job=self._job,
            splits=self.state.can_split,
            stream=self.state.log.stream,
            partition=self.state.log.partition,
        )

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Note that a hello was answered. Raises UsageError, Refused."""
        if self._job is not None:
            check_staging(welcome)
            if not self._was_welcomed and any(grant.watermark for grant in welcome.origins):
                raise UsageError(
                    f"attempt {self._job.attempt} of part {self._job.part} of job {self._job.job!r}: it has "
                    "deltas already, which another task sent: give each attempt a number of its own"
                )
        self._was_welcomed = True
        self.state.on_welcome(welcome, same_address=same_address)

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        """Handle a frame; return True if it brought outcomes. Raises Reconnect, Refused."""
        match frame:
            case Ack():
                return self.state.on_ack(frame)
            case Nack():
                self.state.on_nack(frame, now, self._jitter.random())
            case Backpressure():
                self.state.on_backpressure(frame, now)
        return False

    def data_to_send(self, session: Session, now: float) -> list[Buffer]:
        """Return batches as far as credits and pacing allow, after a hello that claims new origins."""
        state, connection = self.state, session.connection
        connection.stream = state.log.stream
        parts: list[Buffer] = []
        claims = state.claim_new_origins()
        if claims:
            log = state.log
            hello = Hello(
                token=self.token,
                origins=claims,
                source=self._source,
                stream=log.stream,
                partition=log.partition,
            )
            parts.append(session.request(hello)[1])
        size = 0
        while size < SEND_BYTES_MAX and connection.send_window.is_open:
            frame = state.next_frame(now)
            if frame is None:
                break
            batch = frame.batch
            if batch.size < SPLIT_SEND_BYTES_MIN:
                parts.append(connection.send(frame))
            else:  # head and body are sent as two pieces, since joining them would copy the body
                connection.spend(batch.count, batch.size)
                head = encode_head(
                    batch, frame.sequence, ack_wanted=frame.ack_wanted, stream=connection.stream
                )
                parts += [head, batch.raw]
            size += batch.size
        return parts

    def on_sent(self) -> None:
        """Do nothing: callers wait for outcomes, not for sends."""

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a batch may be sent without a `notify`; None: none may."""
        return self.state.wait_s(now)

    def processed_offset(self) -> int | None:
        """Return None: a producer has no cursor."""
        return None

    def on_disconnect(self) -> None:
        """Note that the connection is lost."""
        self.state.on_disconnect()
