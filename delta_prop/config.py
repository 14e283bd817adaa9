"""Settings: every limit of the embedded service, named with its unit, with its default.

Read once, where a propagator is made; relations between limits are checked here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from delta_prop.backpressure.controller import RateLimits
from delta_prop.ingest.id_merging import GENERATIONS_A_RUN_MAX
from delta_prop.ingest.refused_ids import IDS_MAX as REFUSED_IDS_MAX
from delta_prop.ingest.seen_ids import WAITING_MAX
from delta_prop.route.breaker import RetryLimits
from delta_prop.route.status import FeedLimits
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import DELTA_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX

MIB = 1024 * 1024

BYTES_PER_RECENT_ID = 240
BYTES_PER_SEALED_ID = 28
BYTES_PER_MERGED_ID = 2
"""Of the filter of a run that is being merged."""
BYTES_PER_REFUSED_ID = 150
BYTES_PER_HEAD = 220
BYTES_PER_ORIGIN = 3_000
BYTES_PER_PENDING = 2_300
BYTES_PER_SET_ASIDE = 900
"""What one entry of each table was measured to cost in memory, rounded up."""

MEMORY_GENERATIONS_MAX = 16

RateLaw: TypeAlias = Literal["drain", "specification"]
LAWS = get_args(RateLaw)
_COUNTS = frozenset({"batch_deltas", "id_generation", "breaker_deliveries", "breaker_heal_successes"})
_COUNT_ENDINGS = ("deltas_max", "bytes_max", "generations_max", "heads_max", "origins_max", "retries_max")
_MAY_BE_ZERO = frozenset({"linger_ms_max", "retries_max"})


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
    id_index_bytes_max: int = 256 * MIB
    heads_max: int = 2_000_000
    origins_max: int = 100_000
    origins_per_owner_max: int = 1_000
    mailbox_deltas_max: int = 10_000
    mailbox_bytes_max: int = 16 * MIB
    batch_deltas: int = 100
    linger_ms_max: float = 10.0
    merge_deltas_max: int = 1_000
    apply_s_max: float = 300.0
    retries_max: int = 5
    retry_s_first: float = 0.05
    retry_s_max: float = 5.0
    breaker_deliveries: int = 5
    breaker_window_s: float = 60.0
    breaker_probe_s: float = 30.0
    breaker_heal_successes: int = 3
    quarantine_deltas_max: int = 10_000
    quarantine_bytes_max: int = 64 * MIB
    pacing_from: float = 0.8
    pacing_until: float = 0.6
    rate_law: RateLaw = "drain"
    rate_initial: float = 10_000.0
    rate_min: float = 100.0
    rate_max: float = 1_000_000.0
    publish_timeout_s: float = 60.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "rate_law":
                if value not in LAWS:
                    raise UsageError(f"rate_law = {value!r}: give one of {', '.join(LAWS)}")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} = {value!r}: give a number")
            elif not (value > 0 or (name in _MAY_BE_ZERO and value == 0)):
                least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
                raise UsageError(f"{name} = {value}: it must be {least}")
            elif isinstance(value, float) and (name in _COUNTS or name.endswith(_COUNT_ENDINGS)):
                raise UsageError(f"{name} = {value}: it counts, so give a whole number")
        if not self.queue_low_mark < self.queue_high_mark <= 1:
            raise UsageError(
                f"queue_low_mark {self.queue_low_mark} and queue_high_mark {self.queue_high_mark}: "
                "they must rise, and the high one is at most 1 (both are fractions of the queue)"
            )
        if not self.pacing_until < self.pacing_from < 1:
            raise UsageError(
                f"pacing_until {self.pacing_until} and pacing_from {self.pacing_from}: they must rise, "
                "below 1 (both are fractions of a sink's share of the log, or of its own backlog)"
            )
        if self.retry_s_first > self.retry_s_max:
            raise UsageError(
                f"retry_s_first {self.retry_s_first} is above retry_s_max {self.retry_s_max}: waits grow"
            )
        if not self.rate_min <= self.rate_initial <= self.rate_max:
            raise UsageError(
                f"rate_min {self.rate_min}, rate_initial {self.rate_initial}, rate_max {self.rate_max}: they "
                "must not fall: give a rate to begin with that lies between the other two"
            )
        self.rate_limits()  # asserts its own relations
        for name in ("queue_bytes_max", "pending_bytes_max", "mailbox_bytes_max", "quarantine_bytes_max"):
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

    def rate_limits(self, drained: float | None = None) -> RateLimits:
        """What bounds the rate of a pacing sink, which drained so many deltas a second, if that is known."""
        initial = self.rate_initial if drained is None else min(max(drained, self.rate_min), self.rate_max)
        return RateLimits(rate_initial=initial, rate_min=self.rate_min, rate_max=self.rate_max)

    def feed_limits(self, batch_deltas: int | None, linger_ms_max: float | None) -> FeedLimits:
        """What bounds one sink's feed; None takes the setting. Raises UsageError."""
        whole = isinstance(batch_deltas, int) and not isinstance(batch_deltas, bool)
        if batch_deltas is not None and not (whole and 1 <= batch_deltas <= self.merge_deltas_max):
            raise UsageError(
                f"batch_deltas {batch_deltas!r}: give 1 to {self.merge_deltas_max} (merge_deltas_max)"
            )
        if linger_ms_max is not None and not (isinstance(linger_ms_max, int | float) and linger_ms_max >= 0):
            raise UsageError(f"linger_ms_max {linger_ms_max!r}: give 0 or more")
        return FeedLimits(
            mailbox_deltas_max=self.mailbox_deltas_max,
            mailbox_bytes_max=self.mailbox_bytes_max,
            batch_deltas=self.batch_deltas if batch_deltas is None else batch_deltas,
            linger_ms_max=self.linger_ms_max if linger_ms_max is None else linger_ms_max,
            merge_deltas_max=self.merge_deltas_max,
            apply_s_max=self.apply_s_max,
            retry=RetryLimits(
                retries=self.retries_max,
                first_s=self.retry_s_first,
                max_s=self.retry_s_max,
                breaker_deliveries=self.breaker_deliveries,
                breaker_window_s=self.breaker_window_s,
                probe_s=self.breaker_probe_s,
                heal_successes=self.breaker_heal_successes,
            ),
            quarantine_deltas_max=self.quarantine_deltas_max,
            quarantine_bytes_max=self.quarantine_bytes_max,
        )

    @property
    def ids_kept_min(self) -> int:
        """The newest ids, which are known whatever the log lets go."""
        return self.id_generation * self.id_generations_max

    @property
    def memory_id_generation(self) -> int:
        """`id_generation` beside a log in memory: large enough for few generations."""
        return max(self.id_generation, self.log_deltas_max // MEMORY_GENERATIONS_MAX)

    def memory_bytes_max(self, sinks: int) -> int:
        """The worst case of everything bounded here, in bytes, with that many sinks attached.

        Sinks' own bounds (resident vectors, cache entries) come on top; each states its own.
        """
        # Beside a log in memory, where all of them are; beside one on disk few wait to be written.
        sealed_ids = max(self.log_deltas_max, self.ids_kept_min) + self.memory_id_generation
        waiting_ids = self.id_generation * WAITING_MAX
        return (
            self.queue_bytes_max
            + self.pending_bytes_max
            + self.pending_deltas_max * BYTES_PER_PENDING
            + self.log_bytes_max
            + self.memory_id_generation * BYTES_PER_RECENT_ID
            + max(sealed_ids, waiting_ids) * BYTES_PER_SEALED_ID
            + self.id_generation * GENERATIONS_A_RUN_MAX * BYTES_PER_MERGED_ID
            + self.id_index_bytes_max
            + REFUSED_IDS_MAX * BYTES_PER_REFUSED_ID
            + self.heads_max * BYTES_PER_HEAD
            + self.origins_max * BYTES_PER_ORIGIN
            + sinks
            * (
                self.mailbox_bytes_max
                + self.quarantine_bytes_max
                + self.quarantine_deltas_max * BYTES_PER_SET_ASIDE
            )
        )
