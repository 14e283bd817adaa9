"""The status of a server while it starts, serves and ends, for its HTTP port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from delta_prop.server.lags import lags_of
from delta_prop.server.status_view import to_json_value

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.api.statistics import Statistics
    from delta_prop.platform.ports import Clock
    from delta_prop.server.counters import Counters, JobCounts

STARTING = "it is starting"
ENDING = "it is ending"
LOG_FAILED = "the log has failed, and is being recovered"


class ServiceView(Protocol):
    """The part of the 0xD3 service that a status needs."""

    @property
    def counters(self) -> Counters | None:
        """Counters of its connections; None before it listens."""
        ...

    @property
    def job_counts(self) -> JobCounts | None:
        """Counts of its jobs; None before it listens."""
        ...

    @property
    def is_ending(self) -> bool:
        """True once it accepts nothing more."""
        ...

    def connections(self) -> list[dict[str, Any]]:
        """Return each connection, for JSON."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """Return each group of subscribers, for JSON."""
        ...

    async def poll_groups(self) -> None:
        """Read the cursors of groups without a reader."""
        ...

    def jobs(self) -> list[dict[str, Any]]:
        """Return each job, for JSON."""
        ...


class ServerStatus:
    """A `StatusView`. The code that starts the server sets `propagator` and `service` as they open, and
    resets the propagator to None before it ends.
    """

    def __init__(self, *, version: str, clock: Clock | None = None) -> None:
        """`clock`: of the server's world, for the uptime."""
        self.propagator: Propagator | None = None
        self.service: ServiceView | None = None
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
        """Return the status of the server: its version, counters, log and connections."""
        reason, statistics = self.unready_reason(), self.statistics()
        fields: dict[str, Any] = {"version": self._version, "ready": reason is None, "reason": reason}
        if self._clock is not None:
            fields["uptime_s"] = round(self._clock.now() - self._started_at, 1)
        if self.propagator is not None and statistics is not None:
            log = self.propagator.internals().partition.log
            fields |= {"log_id": log.log_id.hex(), "epoch": log.epoch}
            fields |= {name: value for name, value in to_json_value(statistics).items() if name != "sinks"}
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
        return fields

    async def refresh(self) -> None:
        """Read what a status needs from the disk."""
        if self.service is not None:
            await self.service.poll_groups()

    def sinks(self) -> list[dict[str, Any]]:
        """Return each attached sink: its position, state and counters."""
        statistics = self.statistics()
        rows = [] if statistics is None else [to_json_value(sink) for sink in statistics.sinks.values()]
        return [row | {"lag_s": row["lag_s"] and round(row["lag_s"], 3)} for row in rows]

    def statistics(self) -> Statistics | None:
        """Return the statistics of the propagator, if there is one."""
        return None if self.propagator is None else self.propagator.statistics()

    def counters(self) -> Counters | None:
        """Return the counters of connections, if there are any."""
        return None if self.service is None else self.service.counters

    def job_counts(self) -> JobCounts | None:
        """Return the counts of jobs, if there are any."""
        return None if self.service is None else self.service.job_counts

    def connections(self) -> list[dict[str, Any]]:
        """Return each connection."""
        return [] if self.service is None else self.service.connections()

    def groups(self) -> list[dict[str, Any]]:
        """Return each group of subscribers: its cursor, and whether it has a reader."""
        return [] if self.service is None else self.service.groups()

    def jobs(self) -> list[dict[str, Any]]:
        """Return each job: its state and progress."""
        return [] if self.service is None else self.service.jobs()
