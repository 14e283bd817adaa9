"""A server while it starts, serves and ends, as its HTTP port tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from delta_prop.server.lags import lags_of
from delta_prop.server.look import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.embedded import Propagator
    from delta_prop.server.counters import Counters
    from delta_prop.statistics import Statistics

STARTING = "it is starting"
ENDING = "it is ending"
LOG_FAILED = "the log has failed, and is being recovered"


class Served(Protocol):
    """What is asked of the service behind the port for 0xD3."""

    @property
    def counters(self) -> Counters | None:
        """What its connections count; None before it listens."""
        ...

    @property
    def ending(self) -> bool:
        """Whether it takes nothing more."""
        ...

    def peers(self) -> list[dict[str, Any]]:
        """Each connection, for JSON."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """Each group of subscribers, for JSON."""
        ...

    async def look_at_groups(self) -> None:
        """Find out how far groups are that nobody reads for."""
        ...

    def jobs(self) -> list[dict[str, Any]]:
        """Each job, for JSON."""
        ...


class Overview:
    """A `Look`. Whoever starts the server sets `propagator` and `service` as they open; the propagator to
    None before it ends.
    """

    def __init__(self, *, version: str, now: Callable[[], float] | None = None) -> None:
        """`now`: monotonic seconds, for how long it is up already."""
        self.propagator: Propagator | None = None
        self.service: Served | None = None
        self._version = version
        self._now = now
        self._began = 0.0 if now is None else now()

    def ready(self) -> str | None:
        """None where deltas are taken, else why not."""
        if self.service is not None and self.service.ending:
            return ENDING
        if self.propagator is None or self.service is None:
            return STARTING
        self.propagator.inside().room.ask()
        statistics = self.propagator.statistics()
        if statistics.full is not None:
            return str(statistics.full)
        failed = statistics.reopening is not None and statistics.reopening.failed
        return LOG_FAILED if failed else None

    def status(self) -> dict[str, Any]:
        """The server as a whole: what it is, what it counts, its log, its connections."""
        reason, statistics = self.ready(), self.statistics()
        told: dict[str, Any] = {"version": self._version, "ready": reason is None, "reason": reason}
        if self._now is not None:
            told["uptime_s"] = round(self._now() - self._began, 1)
        if self.propagator is not None and statistics is not None:
            log = self.propagator.inside().log
            told |= {"log_id": log.log_id.hex(), "epoch": log.epoch}
            told |= {name: value for name, value in plain(statistics).items() if name != "sinks"}
            sinks = statistics.sinks.values()
            told["sinks"] = len(sinks)
            told["failing_sinks"] = {one.name: one.reason for one in sinks if one.reason is not None}
            told["lags"] = {
                "sinks": lags_of(self.sinks(), "name"),
                "groups": lags_of(self.groups(), "name"),
                "subscribers": lags_of(self.peers(), "number"),
            }
        told |= {"server": plain(self.counters()), "connections": plain(self.peers())}
        told["groups"] = plain(self.groups())
        return told

    async def refresh(self) -> None:
        """Find out what has to be read from the disk, before it is told."""
        if self.service is not None:
            await self.service.look_at_groups()

    def sinks(self) -> list[dict[str, Any]]:
        """Each attached sink: where it stands, what it does, what it counts."""
        statistics = self.statistics()
        told = [] if statistics is None else [plain(one) for one in statistics.sinks.values()]
        return [one | {"lag_s": one["lag_s"] and round(one["lag_s"], 3)} for one in told]

    def statistics(self) -> Statistics | None:
        """What the propagator counts."""
        return None if self.propagator is None else self.propagator.statistics()

    def counters(self) -> Counters | None:
        """What connections count."""
        return None if self.service is None else self.service.counters

    def peers(self) -> list[dict[str, Any]]:
        """Each connection."""
        return [] if self.service is None else self.service.peers()

    def groups(self) -> list[dict[str, Any]]:
        """Each group of subscribers: how far it is, and whether somebody reads for it."""
        return [] if self.service is None else self.service.groups()

    def jobs(self) -> list[dict[str, Any]]:
        """Each job: how it is, and how far."""
        return [] if self.service is None else self.service.jobs()
