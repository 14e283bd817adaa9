"""Metrics for Prometheus: their names, help texts and sources. Their numbers are read at each scrape.

One table per subject; `docs/metrics.md` has the same names. Nothing is counted here, and nothing is global.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from delta_prop.partition.capacity_monitor import KINDS
from delta_prop_wire.core import core_mode

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from delta_prop.server.server_status import ServerStatus

PREFIX = "delta_prop_"


class MetricSpec(NamedTuple):
    """One metric. `path`: the attributes that lead to its number; if one is missing, there is no sample."""

    name: str
    path: str
    help: str


def _parse_specs(table: str) -> tuple[MetricSpec, ...]:
    """Return the metrics of a table: name, path and help text, which an indented line continues."""
    rows = table.strip().replace("\n    ", " ").splitlines()
    return tuple(MetricSpec(*row.split(" ", 2)) for row in rows)


TOTALS = _parse_specs("""
accepted_deltas_total accepted Deltas appended to the logs of all streams.
duplicate_deltas_total duplicates Duplicate deltas, acknowledged without effect.
noop_deltas_total noops Deltas that were finally refused; each has a no-op record.
concurrent_updates_total concurrent_updates Deltas whose producer had not seen the latest delta of the same
    vector.
refusals_total refused Batches and drafts that were refused.
queue_full_refusals_total queue_full Items refused by a full queue.
pending_full_refusals_total pending_full Batches refused for lack of capacity.
pending_timeouts_total pending_timeouts Batches whose dependencies never came.
""")
PARTITION = _parse_specs("""
partition_accepted_deltas_total accepted Deltas appended to the partition's log since it opened.
partition_log_start_offset log.start_offset Offset of the oldest delta that can be read.
partition_log_next_offset log.next_offset Offset of the next delta to be appended.
partition_log_bytes log.bytes Size of the partition's log.
""")
PROPAGATOR = _parse_specs("""
ids ids.ids 16-byte ids that are known.
ids_kept_since_offset ids.kept_since Every id from this offset on is known.
ids_memory_bytes ids.memory_bytes Memory that ids take.
ids_file_bytes ids.file_bytes Disk space that ids take.
queue_deltas queue.depth Deltas queued for the pipeline.
queue_bytes queue.depth_bytes Bytes queued for the pipeline.
queue_deltas_max queue.capacity Capacity of the queue in deltas.
queue_bytes_max queue.capacity_bytes Capacity of the queue in bytes.
pending_deltas pending.pending_deltas Deltas waiting for dependencies.
pending_bytes pending.pending_bytes Bytes waiting for dependencies.
pressure_level pressure.level Backpressure on sources: 0 none, 3 stop.
pressure_deltas_per_second pressure.rate_limit Rate limit for sources, if there is one.
memory_bytes_max memory_bytes_max Memory that the propagator takes if every bound is reached.
log_failed reopening.failed 1 while the log has failed and is being recovered.
log_recoveries_total reopening.reopened Recoveries of the log after a failure.
""")
LOG = _parse_specs("""
log_start_offset start_offset Offset of the oldest delta that can be read.
log_next_offset next_offset Offset of the next delta to be appended.
log_written_offset written Every delta below it is written.
log_synced_offset synced Every delta below it is on stable storage.
log_high_watermark high_watermark Every delta below it may be read.
log_bytes bytes Size of the log.
log_bytes_max bytes_max Maximum size of the log.
log_unwritten_bytes unwritten_bytes Bytes waiting for the disk.
log_segments segments Segment files of the log.
log_commits_total commits Group commits.
log_full_refusals_total refused Batches refused because the log was full.
log_clock_ahead_seconds clock_ahead_s Seconds by which the wall clock leads log time.
log_clock_jumps_total clock_jumps Jumps of the wall clock.
log_snapshot_offset snapshot_offset Offset of the newest snapshot.
log_snapshot_rows snapshot_rows Vectors in the newest snapshot.
log_snapshot_bytes snapshot_bytes Size of the newest snapshot.
""")
LANE = _parse_specs("""
lane_deltas depth Deltas queued in this lane.
lane_taken_deltas_total taken Deltas that left this lane.
lane_taken_items_total items_taken Items, of one delta or more, that left this lane.
lane_wait_seconds_total wait_s_total Total time that items which left this lane were queued.
""")
SINK = _parse_specs("""
sink_lag_deltas lag Deltas in the log that the sink has not processed.
sink_lag_seconds lag_s Age of the oldest delta that the sink has not processed; 0 if none.
sink_applied_offset applied_offset The sink has applied every delta below it.
sink_committed_offset committed_offset The sink has every delta below it durably.
sink_catching_up catching_up 1 while the sink catches up from the log.
sink_mailbox_deltas mailbox_deltas Deltas pushed to the sink and not taken yet.
sink_mailbox_bytes mailbox_bytes Bytes pushed to the sink and not taken yet.
sink_deliveries_total deliveries Calls of the sink that succeeded.
sink_applied_deltas_total applied_deltas Deltas that the sink applied.
sink_skipped_deltas_total skipped Deltas that were not for the sink.
sink_pulled_deltas_total pulled Deltas that could not be pushed.
sink_errors_total errors Calls of the sink that failed.
sink_retries_total retries Calls of the sink that were retries.
sink_breaker_opened_total breaker_opened Times the circuit breaker opened.
sink_failing_offset failing.offset Offset of the delta at which the sink keeps failing.
sink_quarantined_deltas quarantined Deltas in the sink's quarantine.
sink_quarantined_bytes quarantined_bytes Bytes in the sink's quarantine.
sink_rejected_deltas_total rejected Deltas that the sink rejected.
sink_replayed_deltas_total replayed Deltas applied out of the quarantine.
sink_dropped_deltas_total dropped Deltas dropped out of the quarantine.
sink_pacing pacing 1 while the sink slows producers down.
sink_rebuilds_total rebuilds Completed rebuilds.
sink_rebuild_rows rebuild.rows_done Rows done in the current rebuild.
sink_rebuild_rows_max rebuild.rows_total Rows in total in the current rebuild.
""")
SERVER = _parse_specs("""
connections_total connections Connections accepted or refused.
connections_refused_total connections_refused Connections above a limit.
connections_timed_out_total connections_timed_out Connections that timed out.
received_frames_total frames_in Frames received.
sent_frames_total frames_out Frames sent; a file range counts as one.
received_deltas_total deltas_in Deltas received, duplicates included.
sent_deltas_total deltas_out Deltas sent.
received_bytes_total bytes_in Bytes received.
sent_bytes_total bytes_out Bytes sent.
acks_total acks Ack and Nack frames sent to producers.
duplicate_acks_total duplicate_acks Deltas of producers that were acknowledged as duplicates.
""")
JOBS = _parse_specs("""
jobs active Jobs that are staged or being published.
staged_bytes staged_bytes Disk space of the parts of jobs.
staged_deltas_total staged Deltas staged for jobs.
job_published_deltas_total published Deltas of jobs that were published.
job_duplicate_deltas_total duplicates Duplicates among the deltas of jobs.
job_refused_deltas_total refused Deltas of jobs that were refused when published.
jobs_expired_total expired Jobs dropped because they were not decided in time.
""")
LANES = ("critical", "high", "normal", "low")
_PLACE = ("stream", "partition")


class Scrape(Collector):
    """The metrics at one moment."""

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return these metrics."""
        return self._metrics

    def text(self, accepts: str) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type. `accepts`: the client's Accept header.

        It may run on a thread: many sinks take milliseconds.
        """
        encode, content_type = choose_encoder(accepts)
        return encode(self), content_type


class Metrics:
    """Reads metrics from a `ServerStatus`."""

    def __init__(self, view: ServerStatus) -> None:
        self._view = view

    def scrape(self) -> Scrape:
        """Return all metrics as of now."""
        return Scrape(tuple(self._collect()))

    def _collect(self) -> Iterator[Metric]:
        view = self._view
        yield _make_metric(
            "ready", "1 while the server accepts deltas.", [((), view.unready_reason() is None)]
        )
        yield _make_metric("native_core", "1 while the native core runs.", [((), core_mode.is_native)])
        statistics = view.statistics()
        if statistics is not None:
            yield from _table_metrics(TOTALS, (), [((), view.delta_counts())])
            yield from _table_metrics(PROPAGATOR, (), [((), statistics)])
            yield from _table_metrics(LOG, (), [((), statistics.log)])
            full_seconds = [
                ((kind,), statistics.full.seconds if statistics.full and statistics.full.what == kind else 0)
                for kind in KINDS
            ]
            yield _make_metric(
                "full_seconds",
                "Seconds for which this resource (label what) has been full; 0 while it is not full.",
                full_seconds,
                ("what",),
            )
            lanes = zip(LANES, statistics.queue.lanes, strict=True)
            yield from _table_metrics(LANE, ("lane",), [((name,), lane) for name, lane in lanes])
            yield from self._partition_metrics()
        yield from self._server_metrics()

    def _partition_metrics(self) -> Iterator[Metric]:
        partitions = [
            ((each.stream, str(each.partition)), each.statistics) for each in self._view.partitions()
        ]
        yield from _table_metrics(PARTITION, _PLACE, partitions)
        labels = ("sink", *_PLACE)
        sinks = [
            ((name, *place), sink)
            for place, statistics in partitions
            for name, sink in statistics.sinks.items()
        ]
        yield from _table_metrics(SINK, labels, sinks)
        states = [((*values, sink.state), 1) for values, sink in sinks]
        yield _make_metric("sink_state", "1 for the present state of the sink.", states, (*labels, "state"))
        opened = [(values, sink.breaker != "closed") for values, sink in sinks]
        yield _make_metric("sink_breaker_open", "1 while the circuit breaker is open.", opened, labels)

    def _server_metrics(self) -> Iterator[Metric]:
        counters, job_counts = self._view.counters(), self._view.job_counts()
        if counters is None:
            return
        yield from _table_metrics(SERVER, (), [((), counters)])
        yield from _table_metrics(JOBS, (), [((), job_counts)])
        nacks = [((code,), count) for code, count in sorted(counters.nacks.items())]
        yield _make_metric("nacks_total", "Refusals sent to clients, by code.", nacks, ("code",))
        rows = self._view.connections()
        yield _make_metric(
            "connections_held",
            "Connections whose deltas wait for a quota.",
            [((), sum(row["held"] for row in rows))],
        )
        yield from self._quota_metrics()
        subscribed = [row for row in rows if row["subscribed"]]
        catching_up = sum(row["catching_up"] for row in subscribed)
        yield _make_metric("connections", "Open connections.", [((), len(rows))])
        yield _make_metric("subscribers", "Connections with a subscription.", [((), len(subscribed))])
        yield _make_metric(
            "subscribers_catching_up", "Subscribers that read from the log.", [((), catching_up)]
        )
        standing_by = sum(row["standing_by"] for row in subscribed)
        yield _make_metric(
            "subscribers_standing_by", "Subscribers that stand by in a group.", [((), standing_by)]
        )
        labelled_rows = [((str(row["number"]), row["client"] or ""), row) for row in subscribed]
        yield from _lag_metrics("subscriber", ("connection", "client"), labelled_rows)
        labels = ("group", *_PLACE)
        groups = [
            ((group["name"], group["stream"], str(group["partition"])), group)
            for group in self._view.groups()
        ]
        yield from _lag_metrics("group", labels, groups)
        for name, key, help_ in (
            ("group_has_member", "has_member", "1 while a member reads for the group."),
            ("group_members_standing_by", "standing_by", "Members that stand by."),
        ):
            samples = [(values, group[key]) for values, group in groups]
            if samples:
                yield _make_metric(name, help_, samples, labels)

    def _quota_metrics(self) -> Iterator[Metric]:
        counts = sorted(self._view.quota_counts().items())
        for name, key, help_ in (
            ("quota_limit", "limit", "Limit of a quota: per second, but connections in total."),
            ("quota_passed_total", "passed", "Bytes, rows, requests or connections within a quota."),
            ("quota_refused_total", "refused", "Requests or connections refused by a quota."),
        ):
            samples = [(tuple(owner), getattr(count, key)) for owner, count in counts]
            yield _make_metric(name, help_, samples, ("scope", "owner", "quota"))


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
            name, help_, [(values, row[key]) for values, row in rows if row[key] is not None], labels
        )


def _table_metrics(
    specs: Iterable[MetricSpec], labels: Sequence[str], subjects: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    for spec in specs:
        read, known = attrgetter(spec.path), []
        for values, subject in subjects:
            with suppress(AttributeError):  # a log in memory has no segments, an idle sink no rebuild
                if (number := read(subject)) is not None:
                    known.append((values, number))
        if known:
            yield _make_metric(spec.name, spec.help, known, labels)


def _make_metric(
    name: str, help_: str, samples: Iterable[tuple[Sequence[str], float]], labels: Sequence[str] = ()
) -> Metric:
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = family(PREFIX + name, help_, labels=labels)
    for values, number in samples:
        metric.add_metric(values, float(number))
    return metric
