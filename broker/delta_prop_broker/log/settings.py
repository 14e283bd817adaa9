"""The bounds of a log on disk: how large it may become, how long it is kept, what room it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeAlias, get_args

from delta_prop_wire.bounds import check_level
from delta_prop_wire.compression import Compression, available
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
    "keep_s",
    "unwritten_bytes_max",
    "tail_bytes_max",
    "history_s",
    "compact_memory_bytes_max",
    "checkpoint_frames",
    "checkpoint_bytes",
)
_AT_LEAST_ZERO = ("keep_bytes_max", "free_bytes_min", "reserve_bytes")
SEGMENTS_MIN = 4
"""The hard limit holds at least so many segments: one is written to, whole ones are removed."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Bounds of a log on disk. Raises UsageError where they contradict each other.

    `level`: DURABLE shows readers what is synced, LOGGED what is written (a commit is synced then only where
    a batch in it asks for it). `bytes_max` is the hard limit, at which an append is refused as long as a
    holder needs the oldest; `keep_bytes_max` and `keep_s` are how much and how long is kept beyond need.
    After so many frames, or bytes, a checkpoint is written: about what a start has to read and take in.
    `free_bytes_min` stays free on the disk; `reserve_bytes` are taken on it, for what must be written when it
    is full all the same (0: none).
    `compact`: what goes is made into a snapshot first, the latest state of each vector; then a delta stays
    readable by itself for `history_s` (None: `keep_s`), the window for time travel, as far as the bytes
    allow. Making a snapshot takes about `compact_memory_bytes_max` of memory.
    `compress`: with what sealed segments are compressed, `none`, `lz4` or `zstd`.
    """

    level: ReadLevel = AckLevel.DURABLE
    segment_bytes_max: int = 64 * MIB
    segment_s_max: float = 24 * 3600.0
    bytes_max: int = 10 * 1024 * MIB
    keep_bytes_max: int = 8 * 1024 * MIB
    keep_s: float = 7 * 24 * 3600.0
    unwritten_bytes_max: int = 64 * MIB
    tail_bytes_max: int = 64 * MIB
    free_bytes_min: int = 64 * MIB
    reserve_bytes: int = 16 * MIB
    compact: bool = True
    history_s: float | None = None
    compact_memory_bytes_max: int = 64 * MIB
    compress: Compress = "none"
    checkpoint_frames: int = 20_000
    checkpoint_bytes: int = 64 * MIB
    made_by: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", check_level(self.level))  # it may be given by its name
        for one in fields(self):
            _check_number(one.name, getattr(self, one.name), one.default)
        if self.level not in READ_LEVELS:
            raise UsageError(
                f"level = {self.level.name.lower()}: a log on disk shows what is logged or durable"
            )
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} = {value}: it must be above 0")
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            if not value >= 0:
                raise UsageError(f"{name} = {value}: it must be at least 0")
        if self.bytes_max < SEGMENTS_MIN * self.segment_bytes_max:
            raise UsageError(
                f"segment_bytes_max {self.segment_bytes_max} and bytes_max {self.bytes_max}: a log holds at "
                f"least {SEGMENTS_MIN} segments; make it larger, or its segments smaller"
            )
        if self.keep_bytes_max > self.bytes_max:
            raise UsageError(
                f"keep_bytes_max {self.keep_bytes_max}: give at most bytes_max ({self.bytes_max})"
            )
        if self.compress not in COMPRESS:
            raise UsageError(f"compress = {self.compress!r}: give one of {', '.join(COMPRESS)}")
        if self.codec is not None and self.codec not in available():
            raise UsageError(
                f"compress = {self.compress!r}, which is not installed here: install delta-prop[compress], "
                "or choose another one"
            )

    @property
    def kept_s(self) -> float:
        """How long a delta is kept by itself beyond need, in seconds."""
        return self.keep_s if self.history_s is None or not self.compact else self.history_s

    @property
    def compact_from_bytes(self) -> int:
        """Above how many bytes of log its oldest part is compacted, so that there is room meanwhile."""
        spare = max(2 * self.segment_bytes_max, self.bytes_max // 5)
        return min(self.keep_bytes_max, self.bytes_max - spare)

    @property
    def codec(self) -> Compression | None:
        """What sealed segments are compressed with."""
        return None if self.compress == "none" else Compression[self.compress.upper()]


def _check_number(name: str, value: object, default: object) -> None:
    """Refuse what is no number where one is wanted. Raises UsageError."""
    if isinstance(default, bool | str) or (value is None and default is None) or name == "level":
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UsageError(f"{name} = {value!r:.40}: give a number")
