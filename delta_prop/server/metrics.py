"""Metrics for Prometheus: their names, help texts and sources. Their numbers are read at each scrape.

One table per subject; `docs/metrics.md` has the same names. Nothing is counted here, and nothing is global.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from delta_prop.partition.capacity_monitor import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from delta_prop.server.status_view import StatusView

PREFIX = "delta_prop_"


class MetricSpec(NamedTuple):
    """One metric. `path`: the attributes that lead to its number; if one is missing, there is no sample."""

    name: str
    type: Literal["gauge", "counter"]
    path: str
    help: str


PROPAGATOR = (
    MetricSpec("accepted_deltas_total", "counter", "accepted", "Deltas appended to the log."),
    MetricSpec(
        "duplicate_deltas_total", "counter", "duplicates", "Duplicate deltas, acknowledged without effect."
    ),
    MetricSpec(
        "noop_deltas_total", "counter", "noops", "Deltas that were finally refused; each has a no-op record."
    ),
    MetricSpec(
        "concurrent_updates_total",
        "counter",
        "concurrent_updates",
        "Deltas whose producer had not seen the latest delta of the same vector.",
    ),
    MetricSpec("ids", "gauge", "ids.ids", "16-byte ids that are known."),
    MetricSpec("ids_kept_since_offset", "gauge", "ids.kept_since", "Every id from this offset on is known."),
    MetricSpec("ids_memory_bytes", "gauge", "ids.memory_bytes", "Memory that ids take."),
    MetricSpec("ids_file_bytes", "gauge", "ids.file_bytes", "Disk space that ids take."),
    MetricSpec("refusals_total", "counter", "refused", "Batches and drafts that were refused."),
    MetricSpec("queue_deltas", "gauge", "queue.depth", "Deltas queued for the pipeline."),
    MetricSpec("queue_bytes", "gauge", "queue.depth_bytes", "Bytes queued for the pipeline."),
    MetricSpec("queue_deltas_max", "gauge", "queue.capacity", "Capacity of the queue in deltas."),
    MetricSpec("queue_bytes_max", "gauge", "queue.capacity_bytes", "Capacity of the queue in bytes."),
    MetricSpec(
        "queue_full_refusals_total", "counter", "queue.refused_full", "Items refused by a full queue."
    ),
    MetricSpec("pending_deltas", "gauge", "pending.pending_deltas", "Deltas waiting for dependencies."),
    MetricSpec("pending_bytes", "gauge", "pending.pending_bytes", "Bytes waiting for dependencies."),
    MetricSpec(
        "pending_full_refusals_total",
        "counter",
        "pending.refused_full",
        "Batches refused for lack of capacity.",
    ),
    MetricSpec(
        "pending_timeouts_total",
        "counter",
        "pending.refused_timeout",
        "Batches whose dependencies never came.",
    ),
    MetricSpec("pressure_level", "gauge", "pressure.level", "Backpressure on sources: 0 none, 3 stop."),
    MetricSpec(
        "pressure_deltas_per_second",
        "gauge",
        "pressure.rate_limit",
        "Rate limit for sources, if there is one.",
    ),
    MetricSpec(
        "memory_bytes_max",
        "gauge",
        "memory_bytes_max",
        "Memory that the propagator takes if every bound is reached.",
    ),
    MetricSpec(
        "log_failed", "gauge", "reopening.failed", "1 while the log has failed and is being recovered."
    ),
    MetricSpec(
        "log_recoveries_total", "counter", "reopening.reopened", "Recoveries of the log after a failure."
    ),
)
LOG = (
    MetricSpec("log_start_offset", "gauge", "start_offset", "Offset of the oldest delta that can be read."),
    MetricSpec("log_next_offset", "gauge", "next_offset", "Offset of the next delta to be appended."),
    MetricSpec("log_written_offset", "gauge", "written", "Every delta below it is written."),
    MetricSpec("log_synced_offset", "gauge", "synced", "Every delta below it is on stable storage."),
    MetricSpec("log_high_watermark", "gauge", "high_watermark", "Every delta below it may be read."),
    MetricSpec("log_bytes", "gauge", "bytes", "Size of the log."),
    MetricSpec("log_bytes_max", "gauge", "bytes_max", "Maximum size of the log."),
    MetricSpec("log_unwritten_bytes", "gauge", "unwritten_bytes", "Bytes waiting for the disk."),
    MetricSpec("log_segments", "gauge", "segments", "Segment files of the log."),
    MetricSpec("log_commits_total", "counter", "commits", "Group commits."),
    MetricSpec("log_full_refusals_total", "counter", "refused", "Batches refused because the log was full."),
    MetricSpec(
        "log_clock_ahead_seconds", "gauge", "clock_ahead_s", "Seconds by which the wall clock leads log time."
    ),
    MetricSpec("log_clock_jumps_total", "counter", "clock_jumps", "Jumps of the wall clock."),
    MetricSpec("log_snapshot_offset", "gauge", "snapshot_offset", "Offset of the newest snapshot."),
    MetricSpec("log_snapshot_rows", "gauge", "snapshot_rows", "Vectors in the newest snapshot."),
    MetricSpec("log_snapshot_bytes", "gauge", "snapshot_bytes", "Size of the newest snapshot."),
)
LANE = (
    MetricSpec("lane_deltas", "gauge", "depth", "Deltas queued in this lane."),
    MetricSpec("lane_taken_deltas_total", "counter", "taken", "Deltas that left this lane."),
    MetricSpec(
        "lane_taken_items_total",
        "counter",
        "items_taken",
        "Items, of one delta or more, that left this lane.",
    ),
    MetricSpec(
        "lane_wait_seconds_total",
        "counter",
        "wait_s_total",
        "Total time that items which left this lane were queued.",
    ),
)
SINK = (
    MetricSpec("sink_lag_deltas", "gauge", "lag", "Deltas in the log that the sink has not processed."),
    MetricSpec(
        "sink_lag_seconds",
        "gauge",
        "lag_s",
        "Age of the oldest delta that the sink has not processed; 0 if none.",
    ),
    MetricSpec(
        "sink_applied_offset", "gauge", "applied_offset", "The sink has applied every delta below it."
    ),
    MetricSpec(
        "sink_committed_offset", "gauge", "committed_offset", "The sink has every delta below it durably."
    ),
    MetricSpec(
        "sink_catching_up",
        "gauge",
        "catching_up",
        "1 while the sink catches up from the log.",
    ),
    MetricSpec(
        "sink_mailbox_deltas", "gauge", "mailbox_deltas", "Deltas pushed to the sink and not taken yet."
    ),
    MetricSpec("sink_mailbox_bytes", "gauge", "mailbox_bytes", "Bytes pushed to the sink and not taken yet."),
    MetricSpec("sink_deliveries_total", "counter", "deliveries", "Calls of the sink that succeeded."),
    MetricSpec("sink_applied_deltas_total", "counter", "applied_deltas", "Deltas that the sink applied."),
    MetricSpec("sink_skipped_deltas_total", "counter", "skipped", "Deltas that were not for the sink."),
    MetricSpec("sink_pulled_deltas_total", "counter", "pulled", "Deltas that could not be pushed."),
    MetricSpec("sink_errors_total", "counter", "errors", "Calls of the sink that failed."),
    MetricSpec("sink_retries_total", "counter", "retries", "Calls of the sink that were retries."),
    MetricSpec("sink_breaker_opened_total", "counter", "breaker_opened", "Times the circuit breaker opened."),
    MetricSpec(
        "sink_failing_offset",
        "gauge",
        "failing.offset",
        "Offset of the delta at which the sink keeps failing.",
    ),
    MetricSpec("sink_quarantined_deltas", "gauge", "quarantined", "Deltas in the sink's quarantine."),
    MetricSpec("sink_quarantined_bytes", "gauge", "quarantined_bytes", "Bytes in the sink's quarantine."),
    MetricSpec("sink_rejected_deltas_total", "counter", "rejected", "Deltas that the sink rejected."),
    MetricSpec("sink_replayed_deltas_total", "counter", "replayed", "Deltas applied out of the quarantine."),
    MetricSpec("sink_dropped_deltas_total", "counter", "dropped", "Deltas dropped out of the quarantine."),
    MetricSpec("sink_pacing", "gauge", "pacing", "1 while the sink slows producers down."),
    MetricSpec("sink_rebuilds_total", "counter", "rebuilds", "Completed rebuilds."),
    MetricSpec("sink_rebuild_rows", "gauge", "rebuild.rows_done", "Rows done in the current rebuild."),
    MetricSpec(
        "sink_rebuild_rows_max", "gauge", "rebuild.rows_total", "Rows in total in the current rebuild."
    ),
)
SERVER = (
    MetricSpec("connections_total", "counter", "connections", "Connections accepted or refused."),
    MetricSpec("connections_refused_total", "counter", "connections_refused", "Connections above a limit."),
    MetricSpec(
        "connections_timed_out_total",
        "counter",
        "connections_timed_out",
        "Connections that timed out.",
    ),
    MetricSpec("received_frames_total", "counter", "frames_in", "Frames received."),
    MetricSpec("sent_frames_total", "counter", "frames_out", "Frames sent; a file range counts as one."),
    MetricSpec("received_deltas_total", "counter", "deltas_in", "Deltas received, duplicates included."),
    MetricSpec("sent_deltas_total", "counter", "deltas_out", "Deltas sent."),
    MetricSpec("received_bytes_total", "counter", "bytes_in", "Bytes received."),
    MetricSpec("sent_bytes_total", "counter", "bytes_out", "Bytes sent."),
    MetricSpec("acks_total", "counter", "acks", "Ack and Nack frames sent to producers."),
    MetricSpec(
        "duplicate_acks_total",
        "counter",
        "duplicate_acks",
        "Deltas of producers that were acknowledged as duplicates.",
    ),
)
JOBS = (
    MetricSpec("jobs", "gauge", "active", "Jobs that are staged or being published."),
    MetricSpec("staged_bytes", "gauge", "staged_bytes", "Disk space of the parts of jobs."),
    MetricSpec("staged_deltas_total", "counter", "staged", "Deltas staged for jobs."),
    MetricSpec("job_published_deltas_total", "counter", "published", "Deltas of jobs that were published."),
    MetricSpec(
        "job_duplicate_deltas_total",
        "counter",
        "duplicates",
        "Duplicates among the deltas of jobs.",
    ),
    MetricSpec(
        "job_refused_deltas_total", "counter", "refused", "Deltas of jobs that were refused when published."
    ),
    MetricSpec(
        "jobs_expired_total", "counter", "expired", "Jobs dropped because they were not decided in time."
    ),
)
CONNECTIONS = "connections"
SUBSCRIBERS = "subscribers"
SUBSCRIBERS_CATCHING_UP = "subscribers_catching_up"
SUBSCRIBERS_STANDING_BY = "subscribers_standing_by"
GROUP_STANDING_BY = "group_members_standing_by"
GROUP_HAS_MEMBER = "group_has_member"
NACKS = "nacks_total"
SINK_STATE = "sink_state"
SINK_BREAKER_OPEN = "sink_breaker_open"
READY = "ready"
FULL_SECONDS = "full_seconds"
LANES = ("critical", "high", "normal", "low")


class Scrape(Collector):
    """The metrics at one moment."""

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return these metrics."""
        return self._metrics

    def text(self, accepts: str) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type. May run on a thread: many sinks take
        milliseconds.

        `accepts`: the client's Accept header.
        """
        encode, content_type = choose_encoder(accepts)
        return encode(self), content_type


class Metrics:
    """Reads metrics from a `StatusView`."""

    def __init__(self, view: StatusView) -> None:
        self._view = view

    def scrape(self) -> Scrape:
        """Return all metrics as of now."""
        return Scrape(tuple(self._collect()))

    def _collect(self) -> Iterator[Metric]:
        view = self._view
        yield _make_metric(
            READY, "gauge", "1 while the server accepts deltas.", [((), view.unready_reason() is None)]
        )
        statistics = view.statistics()
        if statistics is not None:
            yield from _table_metrics(PROPAGATOR, (), [((), statistics)])
            yield from _table_metrics(LOG, (), [((), statistics.log)])
            full_seconds = [
                ((kind,), statistics.full.seconds if statistics.full and statistics.full.what == kind else 0)
                for kind in KINDS
            ]
            yield _make_metric(
                FULL_SECONDS,
                "gauge",
                "Seconds for which this resource (label what) has been full; 0 while it is not full.",
                full_seconds,
                ("what",),
            )
            lanes = zip(LANES, statistics.queue.lanes, strict=True)
            yield from _table_metrics(LANE, ("lane",), [((name,), lane) for name, lane in lanes])
            sinks = statistics.sinks.items()
            yield from _table_metrics(SINK, ("sink",), [((name,), sink) for name, sink in sinks])
            states = [((name, sink.state), 1) for name, sink in sinks]
            yield _make_metric(
                SINK_STATE, "gauge", "1 for the present state of the sink.", states, ("sink", "state")
            )
            opened = [((name,), sink.breaker != "closed") for name, sink in sinks]
            yield _make_metric(
                SINK_BREAKER_OPEN, "gauge", "1 while the circuit breaker is open.", opened, ("sink",)
            )
        yield from self._server_metrics()

    def _server_metrics(self) -> Iterator[Metric]:
        counters, job_counts = self._view.counters(), self._view.job_counts()
        if counters is None:
            return
        yield from _table_metrics(SERVER, (), [((), counters)])
        yield from _table_metrics(JOBS, (), [((), job_counts)])
        nacks = [((code,), count) for code, count in sorted(counters.nacks.items())]
        yield _make_metric(NACKS, "counter", "Refusals sent to clients, by code.", nacks, ("code",))
        rows = self._view.connections()
        subscribed = [row for row in rows if row["subscribed"]]
        catching_up = sum(row["catching_up"] for row in subscribed)
        yield _make_metric(CONNECTIONS, "gauge", "Open connections.", [((), len(rows))])
        yield _make_metric(SUBSCRIBERS, "gauge", "Connections with a subscription.", [((), len(subscribed))])
        yield _make_metric(
            SUBSCRIBERS_CATCHING_UP, "gauge", "Subscribers that read from the log.", [((), catching_up)]
        )
        standing_by = sum(row["standing_by"] for row in subscribed)
        yield _make_metric(
            SUBSCRIBERS_STANDING_BY, "gauge", "Subscribers that stand by in a group.", [((), standing_by)]
        )
        labelled_rows = [((str(row["number"]), row["client"] or ""), row) for row in subscribed]
        yield from _lag_metrics("subscriber", ("connection", "client"), labelled_rows)
        groups = self._view.groups()
        yield from _lag_metrics("group", ("group",), [((group["name"],), group) for group in groups])
        for name, key, help_ in (
            (GROUP_HAS_MEMBER, "has_member", "1 while a member reads for the group."),
            (GROUP_STANDING_BY, "standing_by", "Members that stand by."),
        ):
            samples = [((group["name"],), group[key]) for group in groups]
            if samples:
                yield _make_metric(name, "gauge", help_, samples, ("group",))


def _lag_metrics(
    subject: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], dict[str, Any]]]
) -> Iterator[Metric]:
    """Yield the lag of each row, in deltas and in seconds, if it is known."""
    for name, key, help_ in (
        (f"{subject}_lag_deltas", "lag", f"Deltas in the log that the {subject} has not processed."),
        (
            f"{subject}_lag_seconds",
            "lag_s",
            f"Age of the oldest delta that the {subject} has not processed; 0 if none.",
        ),
    ):
        yield _make_metric(
            name, "gauge", help_, [(values, row[key]) for values, row in rows if row[key] is not None], labels
        )


def _table_metrics(
    specs: Iterable[MetricSpec], labels: Sequence[str], subjects: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    for spec in specs:
        read = _make_getter(spec.path)
        samples = [(values, read(subject)) for values, subject in subjects]
        known = [(values, number) for values, number in samples if number is not None]
        if known:
            yield _make_metric(spec.name, spec.type, spec.help, known, labels)


def _make_metric(
    name: str,
    type_: Literal["gauge", "counter"],
    help_: str,
    samples: Iterable[tuple[Sequence[str], float]],
    labels: Sequence[str] = (),
) -> Metric:
    family = CounterMetricFamily if type_ == "counter" else GaugeMetricFamily
    metric = family(PREFIX + name, help_, labels=labels)
    for values, number in samples:
        metric.add_metric(values, float(number))
    return metric


def _make_getter(path: str) -> Callable[[Any], float | None]:
    get = attrgetter(path)

    def read(subject: Any) -> float | None:
        try:
            number: float | None = get(subject)
        except AttributeError:  # a log in memory has no segments, an idle sink no rebuild
            return None
        return number

    return read
