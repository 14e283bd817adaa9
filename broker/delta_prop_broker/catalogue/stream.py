"""A stream: its name, its id, its number of partitions and its settings. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from math import inf, isfinite
from typing import Any

from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

DEFAULT_STREAM, DEFAULT_ID = "default", 0
"""The stream that exists without being created; it has one partition."""
NAME_CHARACTERS_MAX = 249
PARTITIONS_MAX = 1 << 16
"""As many as the partition number of an origin, which has 16 bits."""
LOG_SETTINGS = ("retention_s", "retention_bytes", "compact", "compress", "tombstone_retention_s", "ack_level")
"""The settings of a stream that its logs have."""
QUOTAS = ("bytes_in_s", "rows_in_s", "bytes_out_s", "rows_out_s")
"""The settings of a stream that bound its clients."""
INTERNAL_PREFIX = "_"
"""Names with this prefix belong to the service."""

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARACTERS_MAX}}}")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of a stream; None: as the service has them.

    The first ones as in `LogSettings`; `retention_bytes` is that of each partition. The others are quotas of
    all partitions together, in amounts per second: what clients send (`in`) and get (`out`); None for no
    limit.
    """

    retention_s: float | None = None
    retention_bytes: int | None = None
    compact: bool | None = None
    compress: str | None = None
    tombstone_retention_s: float | None = None
    ack_level: str | None = None
    bytes_in_s: float | None = None
    rows_in_s: float | None = None
    bytes_out_s: float | None = None
    rows_out_s: float | None = None

    def __post_init__(self) -> None:
        for name, given in self.quotas().items():
            is_number = isinstance(given, int | float) and not isinstance(given, bool)
            if not (given is None or (is_number and 0 < given < inf)):
                raise UsageError(f"{name} = {given!r:.40}: give a number above 0")
        if self.compact not in (None, True, False):
            raise UsageError(f"compact = {self.compact!r:.40}: give true or false")
        self.log_settings(LogSettings())

    def log_settings(self, service: LogSettings) -> LogSettings:
        """Return the settings of a partition's log; `service`: those of the service. Raises UsageError."""
        given = self.to_json()
        return replace(service, **{name: given[name] for name in LOG_SETTINGS if name in given})

    def quotas(self) -> dict[str, float | None]:
        """Return the quotas by name; None where there is none."""
        return {name: getattr(self, name) for name in QUOTAS}

    def changed(self, changes: dict[str, Any]) -> StreamSettings:
        """Return the settings with changes, by name; None resets one to the service's. Raises UsageError."""
        names = [setting.name for setting in fields(self)]
        for name in changes:
            if name not in names:
                raise UsageError(f"{name!r:.60} is not a setting of a stream: give one of {', '.join(names)}")
        changed = replace(self, **changes)
        for name, value in changes.items():
            if isinstance(value, int) and value > COUNTER_MAX:
                raise UsageError(f"{name} = {value!r:.40}: give at most {COUNTER_MAX}")
            if isinstance(value, float) and not isfinite(value):
                raise UsageError(f"{name} = {value!r:.40}: give a finite number")
        return changed

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream. `stream_id`: never given to another stream. `created_us`: microseconds since 1970."""

    name: str
    stream_id: int
    partitions: int = 1
    settings: StreamSettings = StreamSettings()
    created_us: int = 0

    @property
    def is_internal(self) -> bool:
        """True if it belongs to the service."""
        return self.name.startswith(INTERNAL_PREFIX)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for people and their tools."""
        return {
            "name": self.name,
            "id": self.stream_id,
            "partitions": self.partitions,
            "settings": self.settings.to_json(),
            "created_us": self.created_us,
        }


def check_stream_name(name: object, *, allow_internal: bool = False) -> str:
    """Return the name if a stream may have it. Raises UsageError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"stream {name!r:.80}: give 1 to {NAME_CHARACTERS_MAX} of the characters A-Z, a-z, 0-9, '.', '_' "
            "and '-'; not '.' or '..'"
        )
    if name.startswith(INTERNAL_PREFIX) and not allow_internal:
        raise UsageError(
            f"stream {name!r}: names with {INTERNAL_PREFIX!r} are the service's: give another one"
        )
    return name


def check_partition_count(count: object) -> int:
    """Return the count if a stream may have so many partitions. Raises UsageError."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= PARTITIONS_MAX:
        raise UsageError(f"partitions = {count!r:.40}: give 1 to {PARTITIONS_MAX}")
    return count


def check_partition(stream: Stream, number: int) -> None:
    """Raise Refused (WRONG_PARTITION) unless the stream has a partition of this number."""
    if not 0 <= number < stream.partitions:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {number}: stream {stream.name!r} has {stream.partitions}: name 0 to "
            f"{stream.partitions - 1}",
            details={"partition": number, "partitions": stream.partitions},
        )
