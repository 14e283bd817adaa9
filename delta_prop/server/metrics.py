"""Metrics for Prometheus: names, meanings, and where each number stands. Numbers are read at a scrape alone.

One table a subject; `docs/metrics.md` has the same names. Nothing here counts, and nothing is global.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from delta_prop.fullness import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from delta_prop.server.look import Look

PREFIX = "delta_prop_"


class Row(NamedTuple):
    """One metric. `where`: the number's place, as a path of attributes; where there is none, no sample."""

    name: str
    type: Literal["gauge", "counter"]
    where: str
    help: str


PROPAGATOR = (
    Row("accepted_deltas_total", "counter", "accepted", "Deltas that got a place in the log."),
    Row("duplicate_deltas_total", "counter", "duplicates", "Repeated deltas, acknowledged without effect."),
    Row("void_deltas_total", "counter", "voided", "Deltas whose dots were refused for good."),
    Row("conflicts_total", "counter", "conflicts", "Deltas of a vector whose last one they had not seen."),
    Row("ids", "gauge", "ids.ids", "16-byte ids that are known."),
    Row("ids_kept_since_offset", "gauge", "ids.kept_since", "From this offset on every id is known."),
    Row("ids_memory_bytes", "gauge", "ids.memory_bytes", "What ids take in memory."),
    Row("ids_file_bytes", "gauge", "ids.file_bytes", "What ids take on the disk."),
    Row("refusals_total", "counter", "refused", "Batches and drafts that were refused."),
    Row("queue_deltas", "gauge", "queue.depth", "Deltas that wait before the chain."),
    Row("queue_bytes", "gauge", "queue.depth_bytes", "Bytes that wait before the chain."),
    Row("queue_deltas_max", "gauge", "queue.capacity", "Deltas that the queue takes."),
    Row("queue_bytes_max", "gauge", "queue.capacity_bytes", "Bytes that the queue takes."),
    Row("queue_full_refusals_total", "counter", "queue.refused_full", "Items refused by a full queue."),
    Row("pending_deltas", "gauge", "pending.pending_deltas", "Deltas that wait for their causes."),
    Row("pending_bytes", "gauge", "pending.pending_bytes", "Bytes that wait for their causes."),
    Row(
        "pending_full_refusals_total",
        "counter",
        "pending.refused_full",
        "Batches for which there was no room.",
    ),
    Row("pending_timeouts_total", "counter", "pending.refused_timeout", "Batches whose causes never came."),
    Row("pressure_level", "gauge", "pressure.level", "How pressed the source is: 0 not, 3 nothing goes."),
    Row(
        "pressure_deltas_per_second", "gauge", "pressure.rate_limit", "What the source may send, if bounded."
    ),
    Row("memory_bytes_max", "gauge", "memory_bytes_max", "The worst case of what the propagator bounds."),
    Row("log_failed", "gauge", "reopening.failed", "1 while the log has failed and comes back."),
    Row("log_reopened_total", "counter", "reopening.reopened", "How often a log that failed came back."),
)
LOG = (
    Row("log_first_offset", "gauge", "first_offset", "The oldest delta that can be read by itself."),
    Row("log_next_offset", "gauge", "next_offset", "The offset that the next delta gets."),
    Row("log_written_offset", "gauge", "written", "Below it all is written."),
    Row("log_synced_offset", "gauge", "synced", "Below it all is on stable storage."),
    Row("log_visible_offset", "gauge", "visible", "Below it all may be read."),
    Row("log_bytes", "gauge", "bytes", "What the log holds."),
    Row("log_bytes_max", "gauge", "bytes_max", "What the log may hold."),
    Row("log_unwritten_bytes", "gauge", "unwritten_bytes", "What waits for the disk."),
    Row("log_segments", "gauge", "segments", "Files that the log is kept in."),
    Row("log_commits_total", "counter", "commits", "Group commits."),
    Row("log_full_refusals_total", "counter", "refused", "Batches refused because the log was full."),
    Row("log_clock_ahead_seconds", "gauge", "clock_ahead_s", "How far the wall clock is ahead of log time."),
    Row("log_clock_jumps_total", "counter", "clock_jumps", "Jumps of the wall clock."),
    Row("log_snapshot_offset", "gauge", "snapshot_offset", "Where the newest snapshot stands."),
    Row("log_snapshot_rows", "gauge", "snapshot_rows", "Vectors in the newest snapshot."),
    Row("log_snapshot_bytes", "gauge", "snapshot_bytes", "Size of the newest snapshot."),
)
LANE = (
    Row("lane_deltas", "gauge", "depth", "Deltas that wait in this lane."),
    Row("lane_taken_deltas_total", "counter", "taken", "Deltas that left this lane."),
    Row(
        "lane_taken_items_total",
        "counter",
        "items_taken",
        "Items, of one delta or more, that left this lane.",
    ),
    Row("lane_wait_seconds_total", "counter", "wait_s_total", "How long those items waited, together."),
)
SINK = (
    Row("sink_lag_deltas", "gauge", "lag", "Deltas in the log that the sink has not dealt with."),
    Row("sink_lag_seconds", "gauge", "lag_s", "How old the oldest of them is; 0 where there are none."),
    Row("sink_applied_offset", "gauge", "applied", "Below it the sink has applied all."),
    Row("sink_committed_offset", "gauge", "committed", "Below it the sink has all durably."),
    Row("sink_behind", "gauge", "behind", "1 while the sink reads from the log what it could not be pushed."),
    Row("sink_mailbox_deltas", "gauge", "mailbox_deltas", "Deltas pushed to the sink and not yet taken."),
    Row("sink_mailbox_bytes", "gauge", "mailbox_bytes", "Bytes pushed to the sink and not yet taken."),
    Row("sink_deliveries_total", "counter", "deliveries", "Calls of the sink that succeeded."),
    Row("sink_applied_deltas_total", "counter", "success", "Deltas that the sink applied."),
    Row("sink_skipped_deltas_total", "counter", "skipped", "Deltas that were not for the sink."),
    Row("sink_backpressure_deltas_total", "counter", "backpressure", "Deltas that could not be pushed."),
    Row("sink_errors_total", "counter", "errors", "Calls of the sink that failed."),
    Row("sink_retries_total", "counter", "retries", "Calls of the sink that were made again."),
    Row("sink_breaker_opened_total", "counter", "breaker_opened", "How often the breaker opened."),
    Row("sink_failing_offset", "gauge", "failing.offset", "The delta at which the sink fails on and on."),
    Row("sink_quarantined_deltas", "gauge", "quarantined", "Deltas in the sink's quarantine."),
    Row("sink_quarantined_bytes", "gauge", "quarantined_bytes", "Bytes in the sink's quarantine."),
    Row("sink_rejected_deltas_total", "counter", "rejected", "Deltas that the sink rejected."),
    Row("sink_replayed_deltas_total", "counter", "replayed", "Deltas applied out of the quarantine."),
    Row("sink_dropped_deltas_total", "counter", "dropped", "Deltas dropped out of the quarantine."),
    Row("sink_pacing", "gauge", "pacing", "1 where producers go at the sink's pace."),
    Row("sink_rebuilds_total", "counter", "rebuilds", "Rebuilds that came to their end."),
    Row("sink_rebuild_rows", "gauge", "rebuild.rows_done", "Rows done of a rebuild under way."),
    Row("sink_rebuild_rows_max", "gauge", "rebuild.rows_total", "Rows in all of a rebuild under way."),
)
SERVER = (
    Row("connections_total", "counter", "connections", "Connections that came, refused ones too."),
    Row("connections_refused_total", "counter", "connections_refused", "Connections beyond a bound."),
    Row("peers_lost_total", "counter", "peers_lost", "Connections that ended as nothing was heard any more."),
    Row("received_frames_total", "counter", "frames_in", "Frames received."),
    Row("sent_frames_total", "counter", "frames_out", "Frames sent, or parts of files with many."),
    Row("received_deltas_total", "counter", "deltas_in", "Deltas received, repeated ones too."),
    Row("sent_deltas_total", "counter", "deltas_out", "Deltas sent."),
    Row("received_bytes_total", "counter", "bytes_in", "Bytes received."),
    Row("sent_bytes_total", "counter", "bytes_out", "Bytes sent."),
    Row("acks_total", "counter", "acks", "Frames of producers that were acknowledged."),
    Row("repeated_acks_total", "counter", "repeated", "Frames of producers that repeated what was there."),
)
JOBS = (
    Row("jobs", "gauge", "active", "Jobs that are staged, or being published."),
    Row("staged_bytes", "gauge", "staged_bytes", "What parts of jobs take on disk."),
    Row("staged_deltas_total", "counter", "staged", "Deltas staged for jobs."),
    Row("job_published_deltas_total", "counter", "published", "Deltas of jobs that were published."),
    Row("job_repeated_deltas_total", "counter", "duplicates", "Deltas of jobs that were known before."),
    Row("job_refused_deltas_total", "counter", "refused", "Deltas of jobs that were refused when published."),
    Row("jobs_expired_total", "counter", "expired", "Jobs that were dropped, as nobody decided of them."),
)
CONNECTIONS = "connections"
SUBSCRIBERS = "subscribers"
SUBSCRIBERS_BEHIND = "subscribers_behind"
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
    """The metrics of one moment."""

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """These metrics."""
        return self._metrics

    def text(self, accepts: str) -> tuple[bytes, str]:
        """As text, and its type; `accepts`: what the asker reads, as HTTP says it. For any thread: of many
        sinks it takes milliseconds.
        """
        encode, type_ = choose_encoder(accepts)
        return encode(self), type_


class Metrics:
    """What `look` tells, in a form that Prometheus reads."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def scrape(self) -> Scrape:
        """All metrics now."""
        return Scrape(tuple(self._collect()))

    def _collect(self) -> Iterator[Metric]:
        look = self._look
        yield _one(READY, "gauge", "1 where the server takes deltas.", [((), look.ready() is None)])
        statistics = look.statistics()
        if statistics is not None:
            yield from _table(PROPAGATOR, (), [((), statistics)])
            yield from _table(LOG, (), [((), statistics.log)])
            full = [
                ((kind,), statistics.full.seconds if statistics.full and statistics.full.what == kind else 0)
                for kind in KINDS
            ]
            yield _one(FULL_SECONDS, "gauge", "How long it has been full and takes nothing.", full, ("what",))
            lanes = zip(LANES, statistics.queue.lanes, strict=True)
            yield from _table(LANE, ("lane",), [((name,), lane) for name, lane in lanes])
            sinks = statistics.sinks.items()
            yield from _table(SINK, ("sink",), [((name,), sink) for name, sink in sinks])
            states = [((name, sink.state), 1) for name, sink in sinks]
            yield _one(SINK_STATE, "gauge", "1 for the state that the sink is in.", states, ("sink", "state"))
            opened = [((name,), sink.breaker != "closed") for name, sink in sinks]
            yield _one(SINK_BREAKER_OPEN, "gauge", "1 while the sink is let rest.", opened, ("sink",))
        yield from self._server()

    def _server(self) -> Iterator[Metric]:
        counters = self._look.counters()
        if counters is None:
            return
        yield from _table(SERVER, (), [((), counters)])
        yield from _table(JOBS, (), [((), counters.jobs)])
        nacks = [((code,), count) for code, count in sorted(counters.nacks.items())]
        yield _one(NACKS, "counter", "Refusals that clients were told, by code.", nacks, ("code",))
        peers = self._look.peers()
        subscribed = [peer for peer in peers if peer["subscribed"]]
        behind = sum(peer["behind"] for peer in subscribed)
        yield _one(CONNECTIONS, "gauge", "Connections that are open.", [((), len(peers))])
        yield _one(SUBSCRIBERS, "gauge", "Connections with a subscription.", [((), len(subscribed))])
        yield _one(SUBSCRIBERS_BEHIND, "gauge", "Of these, who reads from the log.", [((), behind)])
        waiting = sum(peer["standing_by"] for peer in subscribed)
        yield _one(SUBSCRIBERS_STANDING_BY, "gauge", "Of these, who stands by in a group.", [((), waiting)])
        of_peers = [((str(peer["number"]), peer["client"] or ""), peer) for peer in subscribed]
        yield from _lags("subscriber", ("connection", "client"), of_peers)
        groups = self._look.groups()
        yield from _lags("group", ("group",), [((group["name"],), group) for group in groups])
        for name, key, help_ in (
            (GROUP_HAS_MEMBER, "has_member", "1 while a member reads for the group."),
            (GROUP_STANDING_BY, "standing_by", "Members that stand by."),
        ):
            told = [((one["name"],), one[key]) for one in groups]
            if told:
                yield _one(name, "gauge", help_, told, ("group",))


def _lags(
    what: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], dict[str, Any]]]
) -> Iterator[Metric]:
    """How far each is behind, in deltas and in seconds, as far as that is known."""
    for name, where, help_ in (
        (f"{what}_lag_deltas", "lag", f"Deltas in the log that the {what} has not processed."),
        (f"{what}_lag_seconds", "lag_s", "How old the oldest of them is; 0 where there are none."),
    ):
        yield _one(
            name, "gauge", help_, [(who, one[where]) for who, one in rows if one[where] is not None], labels
        )


def _table(
    rows: Iterable[Row], labels: Sequence[str], subjects: Sequence[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    for row in rows:
        read = _reader(row.where)
        samples = [(values, read(subject)) for values, subject in subjects]
        told = [(values, number) for values, number in samples if number is not None]
        if told:
            yield _one(row.name, row.type, row.help, told, labels)


def _one(
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


def _reader(where: str) -> Callable[[Any], float | None]:
    get = attrgetter(where)

    def read(subject: Any) -> float | None:
        try:
            number: float | None = get(subject)
        except AttributeError:  # a log in memory has no segments; nothing is being rebuilt
            return None
        return number

    return read
