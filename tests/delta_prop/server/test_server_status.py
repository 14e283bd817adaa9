"""The overview: ready or why not, and everything as JSON, at every moment of a server's life."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import pytest

from delta_prop.log_reopener import ReopeningStatistics
from delta_prop.server.counters import Counters
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.status_view import to_json_value
from delta_prop.testing import run_propagator
from delta_prop.testing.recorded import RecordedPropagator
from delta_prop_wire.frames import PressureLevel
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import made


@dataclass
class Served:
    counters: Counters | None = None
    is_ending: bool = False

    def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "nightly"}]

    def connections(self) -> list[dict[str, Any]]:
        return [{"number": 1, "client": None, "lag": None, "lag_s": None}]

    def groups(self) -> list[dict[str, Any]]:
        return [{"name": "g", "offset": 3, "has_member": False, "lag": 7, "lag_s": 3.5}]

    async def poll_groups(self) -> None:
        pass


def test_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(propagator: RecordedPropagator) -> None:
        overview = ServerStatus(version="1.2")
        assert overview.unready_reason() == "it is starting"
        assert overview.status() == {
            "version": "1.2",
            "ready": False,
            "reason": "it is starting",
            "server": None,
            "connections": [],
            "groups": [],
        }
        assert overview.sinks() == []
        overview.propagator = propagator
        assert overview.unready_reason() == "it is starting"
        served = overview.service = Served(Counters(connections=3))
        assert overview.unready_reason() is None
        await propagator.publish(made("a"))
        await propagator.settle()
        told = overview.status()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert told["ready"]
        assert told["accepted"] == 1
        assert told["log"]["next_offset"] == 1
        assert told["log_id"] == propagator.internals().log.log_id.hex()
        assert told["epoch"] == 1
        assert told["queue"]["lanes"][0]["depth"] == 0
        assert told["pressure"]["level"] == "ok"
        assert (told["sinks"], told["failing_sinks"]) == (1, {})
        assert told["server"]["connections"] == 3
        assert told["connections"] == served.connections()
        assert told["groups"] == served.groups()
        assert told["lags"] == {
            "sinks": {"recorder": {"deltas": 0, "seconds": 0.0}},
            "groups": {"g": {"deltas": 7, "seconds": 3.5}},
            "subscribers": {},
        }
        (sink,) = overview.sinks()
        assert (sink["name"], sink["state"], sink["lag"]) == ("recorder", "idle", 0)
        failed = replace(propagator.statistics(), reopening=ReopeningStatistics(True, 1, 0, "disk", None))
        monkeypatch.setattr(propagator, "statistics", lambda: failed)
        assert overview.unready_reason() == "the log has failed, and is being recovered"
        served.is_ending = True
        assert overview.unready_reason() == "it is ending"

    run_propagator(main)


def test_plain_values_are_what_json_has() -> None:
    value = {
        PressureLevel.WARN: (1, 2.5, inf, nan, None, True),
        "bytes": b"\x00\xff",
        "code": ErrorCode.FENCED,
        "object": complex(1, 2),
        "nested": [Counters(nacks={"FENCED": 1})],
    }
    told = to_json_value(value)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["warn"] == [1, 2.5, None, None, None, True]
    assert (told["bytes"], told["code"], told["object"]) == ("00ff", "fenced", "(1+2j)")
    assert told["nested"][0]["nacks"] == {"FENCED": 1}
