"""The catalogue: the streams that there are, and those being removed. Pure: a change makes a new one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from delta_prop_broker.catalogue.stream import (
    DEFAULT_ID,
    DEFAULT_STREAM,
    PARTITIONS_MAX,
    Stream,
    StreamSettings,
    check_partition_count,
    check_stream_name,
)
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

VERSION = 1
STREAM_ID_MAX = (1 << 32) - 1
PARTITIONS_TOTAL_MAX = PARTITIONS_MAX
"""Maximum number of partitions of all streams of a data directory."""

_DEFAULT = Stream(DEFAULT_STREAM, DEFAULT_ID)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The streams by name. `removed`: deleted streams whose files may still exist.

    `last_id`: the highest id that a stream has ever had, so that none is given twice.
    """

    streams: Mapping[str, Stream] = field(
        default_factory=lambda: MappingProxyType({DEFAULT_STREAM: _DEFAULT})
    )
    removed: tuple[Stream, ...] = ()
    last_id: int = DEFAULT_ID

    # --- questions

    def require(self, name: str) -> Stream:
        """Return the stream of this name. Raises Refused (UNKNOWN_STREAM)."""
        stream = self.streams.get(name)
        if stream is None:
            raise _unknown(f"stream {name!r:.80}", self.streams, {"name": name})
        return stream

    def find(self, stream_id: int) -> Stream:
        """Return the stream with this id. Raises Refused (UNKNOWN_STREAM)."""
        for stream in self.streams.values():
            if stream.stream_id == stream_id:
                return stream
        raise _unknown(f"stream {stream_id}", self.streams, {"stream": stream_id})

    @property
    def partition_count(self) -> int:
        """The number of partitions of all streams."""
        return sum(stream.partitions for stream in self.streams.values())

    # --- changes

    def create(
        self,
        name: str,
        *,
        partitions: int,
        settings: StreamSettings,
        now_us: int,
        if_not_exists: bool = False,
        is_internal: bool = False,
    ) -> Catalogue:
        """Return the catalogue with one more stream, whose id is `last_id` of the result.

        With `if_not_exists`, return this catalogue if the stream exists with as many partitions, and with
        the given settings. Raises UsageError.
        """
        check_stream_name(name, allow_internal=is_internal)
        check_partition_count(partitions)
        known = self.streams.get(name)
        if known is not None:
            if not if_not_exists:
                raise UsageError(f"stream {name!r} exists already: give another name, or --if-not-exists")
            if known.partitions != partitions:
                raise UsageError(
                    f"stream {name!r} exists with {known.partitions} partitions, not {partitions}: their "
                    "number is fixed: give the same one, or another name"
                )
            _check_same_settings(known, settings)
            return self
        total = self.partition_count + partitions
        if total > PARTITIONS_TOTAL_MAX:
            raise UsageError(
                f"partitions = {partitions}: all streams together would have {total}, the bound is "
                f"{PARTITIONS_TOTAL_MAX}: give fewer"
            )
        if self.last_id == STREAM_ID_MAX:
            raise UsageError(f"all {STREAM_ID_MAX} stream ids were given: use another data directory")
        added = Stream(name, self.last_id + 1, partitions, settings, now_us)
        return replace(self, streams=_by_name([*self.streams.values(), added]), last_id=added.stream_id)

    def alter(self, name: str, changes: Mapping[str, Any]) -> Catalogue:
        """Return the catalogue with changed settings of a stream. Raises Refused, UsageError."""
        stream = self.require(name)
        if "partitions" in changes:
            raise UsageError(
                f"partitions: stream {name!r} has {stream.partitions} for its life: copy it to a stream with "
                "another number"
            )
        altered = replace(stream, settings=stream.settings.changed(dict(changes)))
        return replace(self, streams=_by_name([*self.streams.values(), altered]))

    def delete(self, name: str) -> Catalogue:
        """Return the catalogue without a stream, now one of `removed`. Raises Refused, UsageError."""
        stream = self.require(name)
        if stream.stream_id == DEFAULT_ID:
            raise UsageError(f"stream {name!r} exists in every data directory: truncate it instead")
        rest = [other for other in self.streams.values() if other is not stream]
        return replace(self, streams=_by_name(rest), removed=(*self.removed, stream))

    def note_files_removed(self, stream: Stream) -> Catalogue:
        """Return the catalogue after the files of a deleted stream were removed."""
        return replace(self, removed=tuple([other for other in self.removed if other is not stream]))

    # --- as bytes

    def pack(self) -> bytes:
        """Return the catalogue as text."""
        fields = {
            "version": VERSION,
            "last_id": self.last_id,
            "streams": [stream.to_json() for stream in self.streams.values()],
            "removed": [stream.to_json() for stream in self.removed],
        }
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Catalogue:
        """Read a packed catalogue. Raises ValueError, KeyError, TypeError, UsageError if it is none."""
        fields = json.loads(raw)
        if fields["version"] != VERSION:
            raise ValueError(f"version {fields['version']!r:.20}, and this program reads {VERSION}")
        streams = _by_name(map(_stream_of, fields["streams"]))
        removed = tuple(map(_stream_of, fields["removed"]))
        last_id = int(fields["last_id"])
        ids = [stream.stream_id for stream in (*streams.values(), *removed)]
        if DEFAULT_STREAM not in streams or len(set(ids)) < len(ids) or max(ids) > last_id:
            raise ValueError(f"its {len(ids)} streams do not fit each other")
        return cls(streams, removed, last_id)


def _by_name(streams: Iterable[Stream]) -> Mapping[str, Stream]:
    """Return the streams by name, sorted; a later one replaces an earlier one of its name."""
    by_name = {stream.name: stream for stream in streams}
    return MappingProxyType(dict(sorted(by_name.items())))


def _stream_of(fields: Mapping[str, Any]) -> Stream:
    return Stream(
        check_stream_name(fields["name"], allow_internal=True),
        int(fields["id"]),
        check_partition_count(fields["partitions"]),
        StreamSettings(**fields["settings"]),
        int(fields["created_us"]),
    )


def _check_same_settings(known: Stream, given: StreamSettings) -> None:
    """Raise UsageError if a setting that is given is not as the stream has it."""
    present = known.settings.to_json()
    for name, value in given.to_json().items():
        if present.get(name) != value:
            text = f"{present[name]!r:.40}" if name in present else "the service's"
            raise UsageError(
                f"stream {known.name!r} exists, and its {name} is {text}, not {value!r:.40}: change it with "
                "`streams alter`, or leave the setting out"
            )


def _unknown(what: str, known: Iterable[str], details: Mapping[str, Any]) -> Refused:
    names = ", ".join(list(known)[:10])
    return Refused(
        ErrorCode.UNKNOWN_STREAM, f"{what}: unknown: give one of {names}, or create it", details=details
    )
