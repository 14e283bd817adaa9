"""The status of a server while it starts, serves and ends, for its HTTP port, with its readers' lags.

A status is a snapshot: it waits for nothing and changes nothing. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop.server.count_totals import DeltaCounts
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_wire.core import core_mode

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.api.statistics import Statistics
    from delta_prop.hosting.streams import Streams
    from delta_prop.platform.ports import Clock
    from delta_prop.server.quotas import QuotaCounts, QuotaName
    from delta_prop.server.server_context import Counters, JobCounts
    from delta_prop.server.service import Service
    from delta_prop_broker.log.contract import Log

STARTING = "it is starting"
ENDING = "it is ending"
LOG_FAILED = "the log has failed, and is being recovered"


class OpenPartition(NamedTuple):
    """An open partition, with its statistics."""

    stream: str
    partition: int
    propagator: Propagator
    statistics: Statistics

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that name it in JSON."""
        return {"stream": self.stream, "partition": self.partition}


class ServerStatus:
    """The status of one server, of which the starting code sets `propagator` and `service` as they open.

    It resets the propagator, that of the default stream, to None before it ends. `streams_open`: who has the
    other partitions.
    """

    def __init__(self, *, version: str, clock: Clock | None = None) -> None:
        """`clock`: of the server's world, for the uptime."""
        self.propagator: Propagator | None = None
        self.service: Service | None = None
        self.streams_open: Streams | None = None
        self._version = version
        self._clock = clock
        self._started_at = 0.0 if clock is None else clock.now()

    def unready_reason(self) -> str | None:
        """Return None while deltas are accepted, else the reason why not."""
        if self.service is not None and self.service.is_ending:
            return ENDING
        if self.propagator is None or self.service is None:
            return STARTING
        self.propagator.internals().partition.capacity_monitor.refresh()
        statistics = self.propagator.statistics()
        if statistics.full is not None:
            return str(statistics.full)
        failed = statistics.reopening is not None and statistics.reopening.failed
        return LOG_FAILED if failed else None

    def status(self) -> dict[str, Any]:
        """Return the status of the server: its version and core, counters, log and connections."""
        reason, statistics = self.unready_reason(), self.statistics()
        fields: dict[str, Any] = {"version": self._version, "core": core_mode.name}
        fields |= {"ready": reason is None, "reason": reason}
        if self.service is not None:
            fields["address"] = self.service.settings.advertise
        if self._clock is not None:
            fields["uptime_s"] = round(self._clock.now() - self._started_at, 1)
        if self.propagator is not None and statistics is not None:
            log = self.propagator.internals().partition.log
            fields |= {"log_id": log.log_id.hex(), "epoch": log.epoch}
            fields |= {name: value for name, value in to_json_value(statistics).items() if name != "sinks"}
            fields |= to_json_value(self.delta_counts())
            fields["log"] |= {"stream": DEFAULT_STREAM, "partition": 0}
            sinks = statistics.sinks.values()
            fields["sinks"] = len(sinks)
            fields["failing_sinks"] = {sink.name: sink.reason for sink in sinks if sink.reason is not None}
            fields["lags"] = {
                "sinks": lags_of(self.sinks(), "name"),
                "groups": lags_of(self.groups(), "name"),
                "subscribers": lags_of(self.connections(), "number"),
            }
        counters, job_counts = self.counters(), self.job_counts()
        server = None if counters is None else to_json_value(counters) | {"jobs": to_json_value(job_counts)}
        fields |= {"server": server, "connections": to_json_value(self.connections())}
        fields["groups"] = to_json_value(self.groups())
        fields["streams"] = self.streams()
        return fields

    async def refresh(self) -> None:
        """Read what a status needs from the disk."""
        if self.service is not None:
            await self.service.poll_groups()

    def sinks(self) -> list[dict[str, Any]]:
        """Return each attached sink: its position, state and counters."""
        rows = [
            each.fields | to_json_value(sink)
            for each in self.partitions()
            for sink in each.statistics.sinks.values()
        ]
        return [row | {"lag_s": row["lag_s"] and round(row["lag_s"], 3)} for row in rows]

    def partitions(self) -> list[OpenPartition]:
        """Return the open partitions, that of the default stream first."""
        if self.propagator is None:
            return []
        if self.streams_open is None:
            return [OpenPartition(DEFAULT_STREAM, 0, self.propagator, self.propagator.statistics())]
        names = {stream.stream_id: stream.name for stream in self.streams_open.catalogue.streams.values()}
        return [
            OpenPartition(names[name.stream], name.partition, propagator, propagator.statistics())
            for name, propagator in self.streams_open.open_partitions().items()
            if name.stream in names  # else it closes, as the stream was deleted
        ]

    def statistics(self) -> Statistics | None:
        """Return the statistics of the default stream's propagator, if there is one."""
        return None if self.propagator is None else self.propagator.statistics()

    def delta_counts(self) -> DeltaCounts | None:
        """Return the counts of deltas of all partitions since the start, if there are any."""
        statistics = self.statistics()
        if statistics is None:
            return None
        return DeltaCounts.of(statistics) if self.service is None else self.service.delta_counts

    def counters(self) -> Counters | None:
        """Return the counters of connections, if there are any."""
        return None if self.service is None else self.service.counters

    def job_counts(self) -> JobCounts | None:
        """Return the counts of jobs, if there are any."""
        return None if self.service is None else self.service.job_counts

    def quota_counts(self) -> Mapping[QuotaName, QuotaCounts]:
        """Return the use of each quota."""
        return {} if self.service is None else self.service.quota_counts

    def connections(self) -> list[dict[str, Any]]:
        """Return each connection."""
        return [] if self.service is None else self.service.connections()

    def groups(self) -> list[dict[str, Any]]:
        """Return each group of subscribers: its cursor, and whether it has a reader."""
        return [] if self.service is None else self.service.groups()

    def streams(self) -> list[dict[str, Any]]:
        """Return each stream: its settings, and the offsets and sizes of its open partitions."""
        rows = [] if self.service is None else self.service.streams()
        opened: dict[str, list[dict[str, Any]]] = {}
        for each in self.partitions():
            log = each.propagator.internals().partition.log
            fields: dict[str, Any] = {"partition": each.partition, "start_offset": log.start_offset}
            fields |= {"next_offset": log.high_watermark, "log_id": log.log_id.hex()}
            fields |= {"bytes": each.statistics.log.bytes, "accepted": each.statistics.accepted}
            opened.setdefault(each.stream, []).append(fields)
        return [row | {"open": opened.get(row["name"], [])} for row in rows]

    def jobs(self) -> list[dict[str, Any]]:
        """Return each job: its state and progress."""
        return [] if self.service is None else self.service.jobs()


def lag_at(log: Log, offset: int | None) -> dict[str, Any]:
    """Return the lag of a reader that has processed all below `offset`, which is None if unknown."""
    if offset is None:
        return {"lag": None, "lag_s": None}
    age_s = log.age_s(offset)
    return {"lag": max(log.high_watermark - offset, 0), "lag_s": None if age_s is None else round(age_s, 3)}


def lags_of(rows: Iterable[Mapping[str, Any]], name_key: str) -> dict[str, dict[str, Any]]:
    """Return the lag of each row, if known, in deltas and in seconds, by the row's value of `name_key`.

    A row of another partition than the default one has that partition before its name: `orders/3 audit`.
    """
    lagging = (row for row in rows if row["lag"] is not None)
    return {
        f"{label_of(row)}{row[name_key]}": {"deltas": row["lag"], "seconds": row["lag_s"]} for row in lagging
    }


def label_of(row: Mapping[str, Any]) -> str:
    """Return a row's partition, as a prefix of its name; nothing for the default partition."""
    stream = row.get("stream", DEFAULT_STREAM)
    return "" if stream == DEFAULT_STREAM else f"{stream}/{row['partition']} "


def to_json_value(value: Any) -> Any:
    """Convert a value for JSON.

    Dataclasses become objects, enums names, bytes hexadecimal text; infinite numbers and NaN become null.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value):
        return {field.name: to_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(to_json_value(key)): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return str(value)
