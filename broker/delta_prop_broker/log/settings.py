"""The bounds of a log on disk: its size, its retention, and the space that it leaves free."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeAlias, get_args

from delta_prop_wire.bounds import check_ack_level
from delta_prop_wire.compression import Compression, available_codecs
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

Compress: TypeAlias = Literal["none", "lz4", "zstd"]
COMPRESS = get_args(Compress)
READ_LEVELS = (AckLevel.LOGGED, AckLevel.DURABLE)
ReadLevel: TypeAlias = Annotated[AckLevel, READ_LEVELS]
MIB = 1024 * 1024
_ABOVE_ZERO = (
    "segment_bytes_max",
    "segment_s_max",
    "bytes_max",
    "retention_s",
    "unwritten_bytes_max",
    "tail_bytes_max",
    "min_compaction_lag_s",
    "compact_memory_bytes_max",
    "checkpoint_frames",
    "checkpoint_bytes",
)
_LEVELS = ("read_level", "ack_level")
_AT_LEAST_ZERO = ("retention_bytes", "free_bytes_min", "reserve_bytes", "tombstone_retention_s")
SEGMENTS_MIN = 4
"""`bytes_max` holds at least this many segments, so that full ones can be removed beside the active one."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Bounds of a log on disk. Raises UsageError if they contradict each other.

    `read_level`: DURABLE shows readers synced rows, LOGGED written ones (then a commit is synced only if a
    batch in it asks for it). `ack_level`: of a publish that requests none. `bytes_max` is the hard limit, at
    which an append is refused while a holder needs the oldest rows; rows that no holder needs are retained up
    to `retention_bytes` and `retention_s`. A checkpoint is written after `checkpoint_frames` or
    `checkpoint_bytes`: about what a start must replay. `free_bytes_min` stays free on the disk;
    `reserve_bytes` are allocated on it, for writes that must succeed on a full disk (0: none). `compact`:
    rows are compacted into a snapshot, the latest state of each vector, before they are removed; a delta
    stays uncompacted for `min_compaction_lag_s` (None: `retention_s`), the window for time travel, as far as
    the bytes allow. A snapshot keeps what is left of a deleted vector for `tombstone_retention_s` at least,
    and at most about twice as long. Making a snapshot takes about `compact_memory_bytes_max` of memory. A
    segment is sealed at `segment_bytes_max` or `segment_s_max`. `unwritten_bytes_max`: what may be appended
    and not yet written; `tail_bytes_max`: newest batches in memory. `compress`: the codec of sealed segments,
    `none`, `lz4` or `zstd`. `made_by`: name of the program, for the file `format`.
    """

    read_level: ReadLevel = AckLevel.DURABLE
    ack_level: AckLevel = AckLevel.DURABLE
    segment_bytes_max: int = 64 * MIB
    segment_s_max: float = 24 * 3600.0
    bytes_max: int = 10 * 1024 * MIB
    retention_bytes: int = 8 * 1024 * MIB
    retention_s: float = 7 * 24 * 3600.0
    unwritten_bytes_max: int = 64 * MIB
    tail_bytes_max: int = 64 * MIB
    free_bytes_min: int = 64 * MIB
    reserve_bytes: int = 16 * MIB
    compact: bool = True
    min_compaction_lag_s: float | None = None
    tombstone_retention_s: float = 24 * 3600.0
    compact_memory_bytes_max: int = 64 * MIB
    compress: Compress = "none"
    checkpoint_frames: int = 20_000
    checkpoint_bytes: int = 64 * MIB
    made_by: str = ""

    def __post_init__(self) -> None:
        for name in _LEVELS:  # a level may be given by its name
            object.__setattr__(self, name, check_ack_level(getattr(self, name)))
        for setting in fields(self):
            _check_number(setting.name, getattr(self, setting.name), setting.default)
        if self.read_level not in READ_LEVELS:
            raise UsageError(
                f"read_level = {self.read_level.name.lower()}: give logged or durable, for a log on disk"
            )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} = {value}: give a number above 0")
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            if not value >= 0:
                raise UsageError(f"{name} = {value}: give at least 0")
        if self.bytes_max < SEGMENTS_MIN * self.segment_bytes_max:
            raise UsageError(
                f"segment_bytes_max {self.segment_bytes_max} and bytes_max {self.bytes_max}: a log holds at "
                f"least {SEGMENTS_MIN} segments: raise bytes_max, or lower segment_bytes_max"
            )
        if self.retention_bytes > self.bytes_max:
            raise UsageError(
                f"retention_bytes {self.retention_bytes}: give at most bytes_max ({self.bytes_max})"
            )
        if self.compress not in COMPRESS:
            raise UsageError(f"compress = {self.compress!r}: give one of {', '.join(COMPRESS)}")
        if self.codec is not None and self.codec not in available_codecs():
            raise UsageError(
                f"compress = {self.compress!r}, which is not installed here: install delta-prop[compress], "
                "or choose another one"
            )

    @property
    def delta_retention_s(self) -> float:
        """Seconds for which a delta that no holder needs stays uncompacted."""
        return (
            self.retention_s
            if self.min_compaction_lag_s is None or not self.compact
            else self.min_compaction_lag_s
        )

    @property
    def compact_from_bytes(self) -> int:
        """Size of the log, in bytes, from which its oldest part is compacted while capacity is left."""
        spare = max(2 * self.segment_bytes_max, self.bytes_max // 5)
        return min(self.retention_bytes, self.bytes_max - spare)

    @property
    def codec(self) -> Compression | None:
        """The codec of sealed segments; None: they are not compressed."""
        return None if self.compress == "none" else Compression[self.compress.upper()]


def _check_number(name: str, value: object, default: object) -> None:
    """Raise UsageError unless the value is a number, where the setting is one."""
    if isinstance(default, bool | str) or (value is None and default is None) or name in _LEVELS:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UsageError(f"{name} = {value!r:.40}: give a number")
