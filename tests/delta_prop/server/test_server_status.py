"""`ServerStatus`: readiness with its reason, and all statistics as JSON, from start to end of a server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

import pytest

from delta_prop.partition.storage.log_reopener import ReopeningStatistics
from delta_prop.server.count_totals import DeltaCounts
from delta_prop.server.server_context import Counters, JobCounts
from delta_prop.server.server_status import ServerStatus, to_json_value
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import run_propagator
from delta_prop.testing.recorded import RecordedPropagator
from delta_prop_wire.core import core_mode
from delta_prop_wire.frames import PressureLevel
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import make_delta


@dataclass
class FakeService:
    counters: Counters | None = None
    is_ending: bool = False
    job_counts: JobCounts | None = None
    delta_counts: DeltaCounts = field(default_factory=lambda: DeltaCounts(accepted=5))
    settings: ServerSettings = field(
        default_factory=lambda: ServerSettings(advertise="facts.example.net:7373")
    )

    def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "nightly"}]

    def connections(self) -> list[dict[str, Any]]:
        return [{"number": 1, "client": None, "lag": None, "lag_s": None}]

    def groups(self) -> list[dict[str, Any]]:
        return [{"name": "g", "offset": 3, "has_member": False, "lag": 7, "lag_s": 3.5}]

    def streams(self) -> list[dict[str, Any]]:
        return [{"name": "default", "partitions": 1}]

    async def poll_groups(self) -> None:
        pass


def test_status_follows_a_server_from_start_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(propagator: RecordedPropagator) -> None:
        server_status = ServerStatus(version="1.2")
        assert server_status.unready_reason() == "it is starting"
        assert server_status.status() == {
            "version": "1.2",
            "core": core_mode.name,
            "ready": False,
            "reason": "it is starting",
            "server": None,
            "connections": [],
            "groups": [],
            "streams": [],
        }
        assert server_status.sinks() == []
        server_status.propagator = propagator
        assert server_status.unready_reason() == "it is starting"
        service = server_status.service = FakeService(Counters(connections=3), job_counts=JobCounts(staged=5))
        assert server_status.unready_reason() is None
        await propagator.publish(make_delta("a"))
        await propagator.settle()
        status = server_status.status()
        assert json.loads(json.dumps(status, allow_nan=False)) == status
        assert status["ready"]
        assert status["address"] == "facts.example.net:7373"
        assert (status["accepted"], status["pending_timeouts"]) == (5, 0), "of all partitions"
        assert (status["log"]["stream"], status["log"]["partition"]) == ("default", 0)
        (stream,) = status["streams"]
        assert [(one["partition"], one["accepted"], one["next_offset"]) for one in stream["open"]] == [
            (0, 1, 1)
        ]
        assert status["log"]["next_offset"] == 1
        assert status["log_id"] == propagator.internals().partition.log.log_id.hex()
        assert status["epoch"] == 1
        assert status["queue"]["lanes"][0]["depth"] == 0
        assert status["pressure"]["level"] == "ok"
        assert (status["sinks"], status["failing_sinks"]) == (1, {})
        assert (status["server"]["connections"], status["server"]["jobs"]["staged"]) == (3, 5)
        assert status["connections"] == service.connections()
        assert status["groups"] == service.groups()
        assert status["lags"] == {
            "sinks": {"recorder": {"deltas": 0, "seconds": 0.0}},
            "groups": {"g": {"deltas": 7, "seconds": 3.5}},
            "subscribers": {},
        }
        (sink,) = server_status.sinks()
        assert (sink["name"], sink["state"], sink["lag"]) == ("recorder", "idle", 0)
        failed = replace(propagator.statistics(), reopening=ReopeningStatistics(True, 1, 0, "disk", None))
        monkeypatch.setattr(propagator, "statistics", lambda: failed)
        assert server_status.unready_reason() == "the log has failed, and is being recovered"
        service.is_ending = True
        assert server_status.unready_reason() == "it is ending"

    run_propagator(main)


def test_values_are_converted_to_json() -> None:
    value = {
        PressureLevel.WARN: (1, 2.5, inf, nan, None, True),
        "bytes": b"\x00\xff",
        "code": ErrorCode.FENCED,
        "object": complex(1, 2),
        "nested": [Counters(nacks={"FENCED": 1})],
    }
    converted = to_json_value(value)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert converted["warn"] == [1, 2.5, None, None, None, True]
    assert (converted["bytes"], converted["code"], converted["object"]) == ("00ff", "fenced", "(1+2j)")
    assert converted["nested"][0]["nacks"] == {"FENCED": 1}
