"""Settings: every limit of the embedded service, named with its unit, with its default.

Read once, where a propagator is made; relations between limits are checked here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import DELTA_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX

MIB = 1024 * 1024

BYTES_PER_RECENT_ID = 240
BYTES_PER_SEALED_ID = 28
BYTES_PER_HEAD = 220
BYTES_PER_ORIGIN = 3_000
BYTES_PER_PENDING = 1_500
"""What one entry of each table was measured to cost in memory, rounded up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits come in deltas and in bytes; the first that is reached counts. Times are in the unit named.

    Raises UsageError where a limit makes no sense or two contradict each other.
    """

    queue_deltas_max: int = 100_000
    queue_bytes_max: int = 256 * MIB
    queue_high_mark: float = 0.8
    queue_low_mark: float = 0.5
    queue_ageing_s: float = 1.0
    pending_deltas_max: int = 10_000
    pending_bytes_max: int = 64 * MIB
    pending_time_s_max: float = 30.0
    log_deltas_max: int = 1_000_000
    log_bytes_max: int = 256 * MIB
    id_generation: int = 1_000_000
    id_generations_max: int = 16
    heads_max: int = 2_000_000
    origins_max: int = 100_000
    origins_per_owner_max: int = 1_000
    mailbox_deltas_max: int = 10_000
    mailbox_bytes_max: int = 16 * MIB
    batch_deltas: int = 100
    linger_ms_max: float = 10.0
    merge_deltas_max: int = 1_000
    publish_timeout_s: float = 60.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 or (name == "linger_ms_max" and value == 0)):
                raise UsageError(f"{name} = {value}: it must be above 0")
        if not self.queue_low_mark < self.queue_high_mark <= 1:
            raise UsageError(
                f"queue_low_mark {self.queue_low_mark} and queue_high_mark {self.queue_high_mark}: "
                "they must rise, and the high one is at most 1 (both are fractions of the queue)"
            )
        for name in ("queue_bytes_max", "pending_bytes_max", "mailbox_bytes_max"):
            if getattr(self, name) < DELTA_BYTES_MAX:
                raise UsageError(
                    f"{name} = {getattr(self, name)}: one delta may have {DELTA_BYTES_MAX} bytes; "
                    "give room for at least one"
                )
        if self.log_bytes_max < FRAME_PAYLOAD_BYTES_MAX:
            raise UsageError(
                f"log_bytes_max = {self.log_bytes_max}: one frame may have {FRAME_PAYLOAD_BYTES_MAX} bytes"
            )
        if self.merge_deltas_max < self.batch_deltas:
            raise UsageError(
                f"merge_deltas_max {self.merge_deltas_max} is below batch_deltas {self.batch_deltas}: "
                "a sink that is behind gets at least what an idle one gets"
            )

    def memory_bytes_max(self, sinks: int) -> int:
        """The worst case of everything bounded here, in bytes, with that many sinks attached.

        Sinks' own bounds (resident vectors, cache entries) come on top; each states its own.
        """
        return (
            self.queue_bytes_max
            + self.pending_bytes_max
            + self.pending_deltas_max * BYTES_PER_PENDING
            + self.log_bytes_max
            + self.id_generation * BYTES_PER_RECENT_ID
            + self.id_generation * self.id_generations_max * BYTES_PER_SEALED_ID
            + self.heads_max * BYTES_PER_HEAD
            + self.origins_max * BYTES_PER_ORIGIN
            + sinks * self.mailbox_bytes_max
        )
