"""Settings of the embedded service: every limit, named with its unit, with its default.

A propagator reads them once, when it is created. Only this module checks the relations between limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from delta_prop.calls.argument_checks import check_instance, check_path
from delta_prop.delivery.backpressure.controller import RateLimits
from delta_prop.delivery.breaker import RetryLimits
from delta_prop.delivery.status import FeedLimits
from delta_prop.partition.ingest.id_merging import GENERATIONS_PER_RUN_MAX
from delta_prop.partition.ingest.refused_ids import IDS_MAX as REFUSED_IDS_MAX
from delta_prop.partition.ingest.seen_ids import WAITING_MAX
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import DELTA_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX

MIB = 1024 * 1024

BYTES_PER_RECENT_ID = 240
BYTES_PER_SEALED_ID = 28
BYTES_PER_MERGED_ID = 2
"""Bytes per id of the filter of a run that is being merged."""
BYTES_PER_REFUSED_ID = 150
BYTES_PER_HEAD = 220
BYTES_PER_ORIGIN = 3_000
BYTES_PER_PENDING = 2_300
BYTES_PER_QUARANTINED = 900
"""Measured memory cost of one entry of each table, in bytes, rounded up."""

MEMORY_GENERATIONS_MAX = 16
"""Maximum number of generations that the ids of a full in-memory log fill."""

RateLaw: TypeAlias = Literal["drain", "depth"]
LAWS = get_args(RateLaw)
# Settings that must be whole numbers, by their names or the ends of their names.
_COUNTS = frozenset({"batch_deltas", "ids_per_generation", "breaker_failures", "breaker_heal_successes"})
_COUNT_ENDINGS = ("deltas_max", "bytes_max", "generations_max", "heads_max", "origins_max", "retries")
_ZERO_ALLOWED = frozenset({"linger_ms", "retries"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of the embedded service, in deltas and in bytes: the first one reached counts.

    Names state the units. Raises UsageError if a limit is invalid or two contradict each other.
    """

    queue_deltas_max: int = 100_000
    queue_bytes_max: int = 256 * MIB
    queue_high_mark: float = 0.8
    queue_low_mark: float = 0.5
    queue_ageing_s: float = 1.0
    pending_deltas_max: int = 10_000
    pending_bytes_max: int = 64 * MIB
    pending_timeout_s: float = 30.0
    log_deltas_max: int = 1_000_000
    log_bytes_max: int = 256 * MIB
    ids_per_generation: int = 1_000_000
    id_generations_max: int = 16
    id_index_bytes_max: int = 256 * MIB
    heads_max: int = 2_000_000
    origins_max: int = 100_000
    origins_per_owner_max: int = 1_000
    mailbox_deltas_max: int = 10_000
    mailbox_bytes_max: int = 16 * MIB
    batch_deltas: int = 100
    linger_ms: float = 10.0
    merge_deltas_max: int = 1_000
    apply_timeout_s: float = 300.0
    retries: int = 5
    retry_backoff_s: float = 0.05
    retry_backoff_max_s: float = 5.0
    breaker_failures: int = 5
    breaker_window_s: float = 60.0
    breaker_open_s: float = 30.0
    breaker_heal_successes: int = 3
    quarantine_deltas_max: int = 10_000
    quarantine_bytes_max: int = 64 * MIB
    pacing_high_mark: float = 0.8
    pacing_low_mark: float = 0.6
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
            elif not (value > 0 or (name in _ZERO_ALLOWED and value == 0)):
                bound = "at least 0" if name in _ZERO_ALLOWED else "above 0"
                raise UsageError(f"{name} = {value}: give a number {bound}")
            elif isinstance(value, float) and (name in _COUNTS or name.endswith(_COUNT_ENDINGS)):
                raise UsageError(f"{name} = {value}: give a whole number")
        if not self.queue_low_mark < self.queue_high_mark <= 1:
            raise UsageError(
                f"queue_low_mark {self.queue_low_mark}, queue_high_mark {self.queue_high_mark}: not low < "
                "high <= 1: give two fractions of the queue, the low one below the high one"
            )
        if not self.pacing_low_mark < self.pacing_high_mark < 1:
            raise UsageError(
                f"pacing_low_mark {self.pacing_low_mark}, pacing_high_mark {self.pacing_high_mark}: not "
                "low < high < 1: give two fractions of a sink's share of the log or of its own backlog, the "
                "low one below the high one"
            )
        if self.retry_backoff_s > self.retry_backoff_max_s:
            raise UsageError(
                f"retry_backoff_s {self.retry_backoff_s}: above retry_backoff_max_s "
                f"{self.retry_backoff_max_s}: raise the maximum, or lower the first backoff"
            )
        if not self.rate_min <= self.rate_initial <= self.rate_max:
            raise UsageError(
                f"rate_min {self.rate_min}, rate_initial {self.rate_initial}, rate_max {self.rate_max}: not "
                "min <= initial <= max: give them in ascending order"
            )
        self.rate_limits()  # `RateLimits` checks the relations of its fields
        for name in ("queue_bytes_max", "pending_bytes_max", "mailbox_bytes_max", "quarantine_bytes_max"):
            if getattr(self, name) < DELTA_BYTES_MAX:
                raise UsageError(
                    f"{name} = {getattr(self, name)}: a delta may have {DELTA_BYTES_MAX} bytes: "
                    "give at least that many"
                )
        if self.log_bytes_max < FRAME_PAYLOAD_BYTES_MAX:
            raise UsageError(
                f"log_bytes_max = {self.log_bytes_max}: a frame may have {FRAME_PAYLOAD_BYTES_MAX} bytes: "
                "give at least that many"
            )
        if self.merge_deltas_max < self.batch_deltas:
            raise UsageError(
                f"merge_deltas_max {self.merge_deltas_max}: below batch_deltas {self.batch_deltas}: "
                "raise it, since a lagging sink gets batches at least as large as an idle one"
            )

    def rate_limits(self, drain_rate: float | None = None) -> RateLimits:
        """Return the limits of a pacing sink's rate; `drain_rate`: its deltas per second, if known."""
        initial = self.rate_initial
        if drain_rate is not None:
            initial = min(max(drain_rate, self.rate_min), self.rate_max)
        return RateLimits(rate_initial=initial, rate_min=self.rate_min, rate_max=self.rate_max)

    def feed_limits(self, batch_deltas: int | None, linger_ms: float | None) -> FeedLimits:
        """Return the limits of one sink's feed; None takes the setting. Raises UsageError."""
        is_integer = isinstance(batch_deltas, int) and not isinstance(batch_deltas, bool)
        if batch_deltas is not None and not (is_integer and 1 <= batch_deltas <= self.merge_deltas_max):
            raise UsageError(
                f"batch_deltas {batch_deltas!r}: give 1 to {self.merge_deltas_max} (merge_deltas_max)"
            )
        if linger_ms is not None and not (isinstance(linger_ms, int | float) and linger_ms >= 0):
            raise UsageError(f"linger_ms {linger_ms!r}: give 0 or more")
        return FeedLimits(
            mailbox_deltas_max=self.mailbox_deltas_max,
            mailbox_bytes_max=self.mailbox_bytes_max,
            batch_deltas=self.batch_deltas if batch_deltas is None else batch_deltas,
            linger_ms=self.linger_ms if linger_ms is None else linger_ms,
            merge_deltas_max=self.merge_deltas_max,
            apply_timeout_s=self.apply_timeout_s,
            retry=RetryLimits(
                retries=self.retries,
                first_s=self.retry_backoff_s,
                max_s=self.retry_backoff_max_s,
                breaker_failures=self.breaker_failures,
                breaker_window_s=self.breaker_window_s,
                probe_s=self.breaker_open_s,
                heal_successes=self.breaker_heal_successes,
            ),
            quarantine_deltas_max=self.quarantine_deltas_max,
            quarantine_bytes_max=self.quarantine_bytes_max,
        )

    @property
    def ids_retained_min(self) -> int:
        """Number of newest ids that are remembered whatever the log removes."""
        return self.ids_per_generation * self.id_generations_max

    @property
    def memory_ids_per_generation(self) -> int:
        """`ids_per_generation` for an in-memory log: a full log fills about MEMORY_GENERATIONS_MAX."""
        return max(self.ids_per_generation, self.log_deltas_max // MEMORY_GENERATIONS_MAX)

    def memory_bytes_max(self, sinks: int) -> int:
        """Return the worst-case memory of everything bounded here, in bytes, with `sinks` sinks attached.

        Sinks' own bounds (resident vectors, cache entries) come on top; each states its own.
        """
        # An in-memory log keeps all sealed ids in memory; a durable log keeps only those not written yet.
        sealed_ids = max(self.log_deltas_max, self.ids_retained_min) + self.memory_ids_per_generation
        unwritten_ids = self.ids_per_generation * WAITING_MAX
        return (
            self.queue_bytes_max
            + self.pending_bytes_max
            + self.pending_deltas_max * BYTES_PER_PENDING
            + self.log_bytes_max
            + self.memory_ids_per_generation * BYTES_PER_RECENT_ID
            + max(sealed_ids, unwritten_ids) * BYTES_PER_SEALED_ID
            + self.ids_per_generation * GENERATIONS_PER_RUN_MAX * BYTES_PER_MERGED_ID
            + self.id_index_bytes_max
            + REFUSED_IDS_MAX * BYTES_PER_REFUSED_ID
            + self.heads_max * BYTES_PER_HEAD
            + self.origins_max * BYTES_PER_ORIGIN
            + sinks
            * (
                self.mailbox_bytes_max
                + self.quarantine_bytes_max
                + self.quarantine_deltas_max * BYTES_PER_QUARANTINED
            )
        )


def check_data(data: object, log: object) -> tuple[str | None, LogSettings]:
    """Return the data directory, None for an in-memory log, and the log's settings. Raises UsageError."""
    if log is not None:
        check_instance("log", log, LogSettings, "delta_prop.LogSettings(…)")
        if data is None:
            raise UsageError(
                "log: LogSettings are for a log in a directory: give data=DIR too; an in-memory log has its "
                "bounds in Settings(log_deltas_max=…, log_bytes_max=…)"
            )
    if data is None:
        return None, LogSettings()
    path = check_path("data", data)
    if "\0" in path:
        raise UsageError(f"data {path!r:.60} does not name a directory: give a path, or leave data out")
    return path, log if isinstance(log, LogSettings) else LogSettings()
