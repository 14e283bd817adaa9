"""A producer's frames: what its side of a connection says and takes in, whoever moves the bytes.

Pure. The asynchronous and the blocking producer are two shells around this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.outgoing import Outgoing
from delta_prop_wire.codec import encode_head
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Ack, Backpressure, Hello, Nack

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from delta_prop.client.session import Session
    from delta_prop_wire.delta import AckLevel
    from delta_prop_wire.frames import Frame, JobPart, Welcome

SEND_BYTES_MAX = 256 * 1024
"""How much is handed to the system at once, but for a batch that is larger."""
APART_BYTES = 64 * 1024
"""From so many bytes on a batch goes in two pieces."""
JOBS = "jobs"
"""What a service has among its features that can keep the parts of a job aside."""


def check_stages(welcome: Welcome) -> None:
    """Raise UsageError where a service keeps no jobs: it would log what is sent to be kept aside."""
    if JOBS not in welcome.features:
        raise UsageError(
            "the service keeps no jobs: its log has to be in a directory, and the program new enough; or "
            "send without a job"
        )


class Producing:
    """`Outgoing` in frames. It is what a link's user has to be."""

    def __init__(
        self,
        name: str,
        *,
        token: str | None,
        source: Source,
        ack_level: AckLevel | None,
        chance: Callable[[], float],
        partition: int = 0,
        log_id: bytes | None = None,
        job: JobPart | None = None,
        priority: Priority = Priority.NORMAL,
        splits: bool = False,
    ) -> None:
        """`job`: the part of a job that is staged here, instead of being published. `priority`: what is
        claimed first. `splits`: as `Outgoing` has it.
        """
        if source is Source.REPLICA:
            raise UsageError("source replica is what a service says that forwards: give another one")
        self.out = Outgoing(
            name, ack_level=ack_level, partition=partition, log_id=log_id, priority=priority, splits=splits
        )
        self._job = job
        self._met = False  # a service has answered
        self._token = token
        self._source = source
        self._chance = chance

    def hello(self) -> Hello:
        """What opens a connection."""
        return Hello(
            token=self._token,
            origins=self.out.claims(),
            source=self._source,
            client=self.out.name[:60],
            job=self._job,
            splits=self.out.splits,
        )

    def welcomed(self, welcome: Welcome, *, same_address: bool) -> None:
        """A hello was answered. Raises UsageError, Refused."""
        if self._job is not None:
            check_stages(welcome)
            if not self._met and any(grant.watermark for grant in welcome.origins):
                raise UsageError(
                    f"attempt {self._job.attempt} of part {self._job.part} of job {self._job.job!r} holds "
                    "deltas already, which another task sent: give each attempt a number of its own"
                )
        self._met = True
        self.out.welcomed(welcome, same_address=same_address)

    def take(self, frame: Frame, size: int, now: float) -> bool:
        """A frame came. Raises Reconnect, Refused."""
        match frame:
            case Ack():
                return self.out.acknowledged(frame)
            case Nack():
                self.out.refused(frame, now, self._chance())
            case Backpressure():
                self.out.pressed(frame, now)
        return False

    def to_send(self, session: Session, now: float) -> list[Buffer]:
        """Batches as far as credits and advice go, a hello for origins that are new before them."""
        out, connection = self.out, session.connection
        parts: list[Buffer] = []
        claims = out.further_claims()
        if claims:
            hello = Hello(token=self._token, origins=claims, source=self._source)
            parts.append(session.request(hello)[1])
        size = 0
        while size < SEND_BYTES_MAX and connection.window.open:
            frame = out.next_frame(now)
            if frame is None:
                break
            batch = frame.batch
            if batch.size < APART_BYTES:
                parts.append(connection.send(frame))
            else:  # its body as it lies, which a frame in one piece would copy
                connection.spend(batch.count, batch.size)
                parts += [encode_head(batch, frame.sequence, ack_wanted=frame.ack_wanted), batch.raw]
            size += batch.size
        return parts

    def sent(self) -> None:
        """Nobody waits for that: an outcome is waited for."""

    def wait_s(self, now: float) -> float | None:
        """When something is to be sent though nobody asks for it."""
        return self.out.wait_s(now)

    def dealt_with(self) -> int | None:
        """A producer has no cursor."""
        return None

    def disconnected(self) -> None:
        """The connection is gone."""
        self.out.disconnected()
