"""Metrics: each row of a table finds its value, the page lists every name, and no metric is global."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from delta_prop.api.statistics import Statistics
from delta_prop.delivery.backpressure.pacer import Pressure
from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.status import FailingDelta, FeedStatistics, RebuildProgress
from delta_prop.partition.capacity_monitor import FullResource
from delta_prop.partition.ingest.fair_queue import LaneStatistics, QueueStatistics
from delta_prop.partition.ingest.seen_ids import SeenIdsStatistics
from delta_prop.partition.order.orderer import OrdererStatistics
from delta_prop.partition.storage.log_reopener import ReopeningStatistics
from delta_prop.server import metrics
from delta_prop.server.count_totals import DeltaCounts
from delta_prop.server.metrics import Metrics
from delta_prop.server.quotas import QuotaCounts, QuotaName
from delta_prop.server.server_context import Counters, JobCounts
from delta_prop.server.server_status import OpenPartition, ServerStatus
from delta_prop.testing import run_propagator
from delta_prop.testing.recorded import RecordedPropagator
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_wire.core import core_mode
from delta_prop_wire.frames import PressureLevel
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import make_delta

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def numbered(kind: type, **known: Any) -> Any:
    """Return a dataclass with the `known` values, and a different number in each other field."""
    names = [field.name for field in dataclasses.fields(kind)]
    assert known.keys() <= {*names}
    return kind(**{name: known.get(name, 100 + index) for index, name in enumerate(names)})


class CompleteStatus:
    """A `ServerStatus` with every part present."""

    def __init__(self) -> None:
        rebuild = RebuildProgress("x", 7, 70, 700)
        known = {"name": "storage", "state": "idle", "reason": None, "breaker": "open"}
        known |= {"failing": FailingDelta(17, "docs", "a", 6)}
        sink = numbered(FeedStatistics, **known, catching_up=True, pacing=False, rebuild=rebuild)
        self.complete_statistics = numbered(
            Statistics,
            queue=numbered(QueueStatistics, lanes=tuple(numbered(LaneStatistics) for _ in range(4))),
            pending=numbered(OrdererStatistics),
            log=numbered(DurableLogStatistics, held_by=None),
            sinks={"storage": sink},
            ids=numbered(SeenIdsStatistics),
            full=FullResource("disk", "2026-01-31T09:00:00.000Z", 57.5, "no bytes left", 1000),
            pressure=Pressure(PressureLevel.THROTTLE, 1234.5, 1, 2, None, None, ""),
            reopening=ReopeningStatistics(True, 1, 17, None, None),
        )
        self.complete_delta_counts = numbered(DeltaCounts)
        self.complete_counters = numbered(Counters, nacks={})
        self.complete_job_counts = numbered(JobCounts)
        self.complete_counters.count_nack(ErrorCode.RATE_LIMITED)
        self.complete_counters.count_nack(ErrorCode.RATE_LIMITED)

    def unready_reason(self) -> str | None:
        return None

    def status(self) -> dict[str, Any]:
        return {}

    def sinks(self) -> list[dict[str, Any]]:
        return []

    def statistics(self) -> Statistics | None:
        return self.complete_statistics

    def delta_counts(self) -> DeltaCounts | None:
        return self.complete_delta_counts

    def partitions(self) -> list[OpenPartition]:
        names = [("default", 0), ("orders", 3)]
        return [OpenPartition(*name, object(), self.complete_statistics) for name in names]  # type: ignore[arg-type]

    def counters(self) -> Counters | None:
        return self.complete_counters

    def job_counts(self) -> JobCounts | None:
        return self.complete_job_counts

    def quota_counts(self) -> dict[QuotaName, QuotaCounts]:
        return {
            QuotaName("token", "ci", "requests_s"): QuotaCounts(5.5, 17, 2),
            QuotaName("stream", "orders", "rows_in_s"): QuotaCounts(100.0, 700),
        }

    def groups(self) -> list[dict[str, Any]]:
        read = {"name": "g", "lag": 7, "lag_s": 3.5, "has_member": True, "standing_by": 2}
        place = {"stream": "orders", "partition": 3}
        return [
            read | {"stream": "default", "partition": 0},
            read | place,
            {"name": "without-offset", "lag": None, "lag_s": None, "has_member": False, "standing_by": 0}
            | place,
        ]

    async def refresh(self) -> None:
        pass

    def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "nightly"}]

    def connections(self) -> list[dict[str, Any]]:
        states = [(False, False), (True, True), (True, False)]
        common = {"client": "c", "lag": 5, "lag_s": 2.5, "held": True}
        return [
            {"number": number, "subscribed": subscribed, "catching_up": catching_up, "standing_by": False}
            | common
            for number, (subscribed, catching_up) in enumerate(states)
        ]


def parse_samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name.removeprefix("delta_prop_"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_table_row_finds_its_value() -> None:
    view = CompleteStatus()
    samples = parse_samples(Metrics(view).scrape().text("")[0])
    sink = view.complete_statistics.sinks["storage"]
    subjects = {
        "totals": view.complete_delta_counts,
        "partition": view.complete_statistics,
        "": view.complete_statistics,
        "log": view.complete_statistics.log,
        "lane": view.complete_statistics.queue.lanes[1],
        "sink": sink,
    }
    tables = {
        "totals": metrics.TOTALS,
        "partition": metrics.PARTITION,
        "": metrics.PROPAGATOR,
        "log": metrics.LOG,
        "lane": metrics.LANE,
        "sink": metrics.SINK,
    }
    place = ("3", "orders")
    labels = {
        "totals": (),
        "partition": place,
        "": (),
        "log": (),
        "lane": ("high",),
        "sink": ("3", "storage", "orders"),
    }
    for subject, table in tables.items():
        for row in table:
            value: Any = subjects[subject]
            for name in row.path.split("."):
                value = getattr(value, name)
            assert samples[row.name, labels[subject]] == float(value), row.name
    for row in metrics.SERVER:
        assert samples[row.name, ()] == float(getattr(view.complete_counters, row.path)), row.name
    for row in metrics.JOBS:
        assert samples[row.name, ()] == float(getattr(view.complete_job_counts, row.path)), row.name
    assert samples["nacks_total", ("RATE_LIMITED",)] == 2
    assert [samples[name, ()] for name in ("connections", "subscribers", "subscribers_catching_up")] == [
        3,
        2,
        1,
    ]
    quota = "ci", "requests_s", "token"
    assert samples["connections_held", ()] == 3
    assert [samples[f"quota_{name}", quota] for name in ("limit", "passed_total", "refused_total")] == [
        5.5,
        17,
        2,
    ]
    assert samples["quota_passed_total", ("orders", "rows_in_s", "stream")] == 700
    assert samples["sink_state", ("3", "storage", "idle", "orders")] == 1
    assert samples["sink_breaker_open", ("0", "storage", "default")] == 1
    assert samples["pressure_deltas_per_second", ()] == 1234.5
    assert samples["sink_rebuild_rows_max", ("0", "storage", "default")] == 700
    assert [samples[f"subscriber_lag_{unit}", ("c", "2")] for unit in ("deltas", "seconds")] == [5, 2.5]
    assert ("subscriber_lag_deltas", ("c", "0")) not in samples
    for place in (("0", "default"), ("3", "orders")):
        group = ("g", *place)
        assert [samples[f"group_lag_{unit}", group] for unit in ("deltas", "seconds")] == [7, 3.5]
    assert ("group_lag_deltas", ("without-offset", "3", "orders")) not in samples
    assert [samples["full_seconds", (resource,)] for resource in ("disk", "log", "queue")] == [57.5, 0, 0]


def test_page_lists_exactly_the_metrics_with_their_types() -> None:
    text = Metrics(CompleteStatus()).scrape().text("")[0].decode()
    types = dict(re.findall(r"^# TYPE delta_prop_(\S+) (\S+)$", text, re.MULTILINE))
    documented: dict[str, str] = {}
    for names, type_ in re.findall(r"^\| (.+?) \| (gauge|counter) \|", PAGE, re.MULTILINE):
        documented |= dict.fromkeys(re.findall(r"`delta_prop_([a-z_]+)[{`]", names), type_)
    assert documented == types
    mentioned = set(re.findall(r"`delta_prop_([a-z_]+)[{`]", PAGE))
    assert mentioned == set(types), "the page should name only existing metrics"
    row = next(line for line in PAGE.splitlines() if "sink_state{" in line)
    assert row.partition("state: ")[2].rstrip(" |").split(", ") == [state.value for state in FeedState]


def test_metric_names_follow_the_rules() -> None:
    for row in (
        *metrics.TOTALS,
        *metrics.PARTITION,
        *metrics.PROPAGATOR,
        *metrics.LOG,
        *metrics.LANE,
        *metrics.SINK,
        *metrics.SERVER,
        *metrics.JOBS,
    ):
        assert row.help.endswith("."), row.name


def test_missing_value_has_no_sample() -> None:
    samples = parse_samples(Metrics(ServerStatus(version="1")).scrape().text("")[0])
    assert samples == {("ready", ()): 0.0, ("native_core", ()): core_mode.is_native}

    async def main(propagator: RecordedPropagator) -> None:
        server_status = ServerStatus(version="1")
        server_status.propagator = propagator
        server_metrics = Metrics(server_status)
        await propagator.publish(make_delta("a"))
        await propagator.settle()
        present_samples = parse_samples(server_metrics.scrape().text("")[0])
        assert present_samples["accepted_deltas_total", ()] == 1
        assert present_samples["sink_applied_deltas_total", ("0", "recorder", "default")] == 1
        assert present_samples["log_next_offset", ()] == 1
        assert ("log_segments", ()) not in present_samples
        assert ("sink_rebuild_rows", ("0", "recorder", "default")) not in present_samples
        assert ("connections_total", ()) not in present_samples
        await propagator.publish(make_delta("b"))
        assert parse_samples(server_metrics.scrape().text("")[0])["accepted_deltas_total", ()] == 2

    run_propagator(main)


def test_metrics_are_not_global_and_read_only_when_scraped() -> None:
    class UnscrapedView(CompleteStatus):
        def statistics(self) -> Statistics | None:
            raise AssertionError("statistics should be read only during a scrape")

    before = list(REGISTRY._collector_to_names)
    Metrics(UnscrapedView())
    Metrics(UnscrapedView())
    assert list(REGISTRY._collector_to_names) == before
