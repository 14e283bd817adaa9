"""The demo's fault scenes: one sink is slowed, one is killed in the middle of a batch.

The deltas published meanwhile are real edits, recorded like all others. They add to values instead of
setting them, so a delta that is lost or applied twice leaves a wrong number, which the verification finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import anyio

from delta_prop.demo.console import format_size
from delta_prop.demo.faulty_sinks import CrashingSink, SlowSink
from delta_prop.demo.library import Library
from delta_prop.demo.wiring import Wiring, quantile_ms
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.demo.scenes import Play

SLOWDOWN_FACTOR = 100
EDITS_MAX = 800
EDIT_INTERVAL_S = 0.0025
UNSLOWED_S_MAX, SLOWED_S_MAX = 1.0, 2.5
"""Maximum duration of the slow scene before and after the sink is slowed."""
BATCH_EDITS_MAX = 100
LINKS_PER_DOCUMENT_MAX = 8
BATCH_PAUSE_S = 0.03
_DRAW_INTERVAL_S = 0.1
_SAMPLE_INTERVAL_S = 0.02


async def slow_scene(play: Play, wiring: Wiring) -> None:
    """Slow one sink down while edits go on; show the effect on it and on the others."""
    console = play.console
    count = min(EDITS_MAX, LINKS_PER_DOCUMENT_MAX * len(play.library.documents))
    edits = _make_link_edits(play.library, count)
    audit = SlowSink(JsonLinesSink(play.workspace.audit, name="audit"), play.timer)
    wiring.audit_start_offset = wiring.delta_count
    await wiring.propagator.attach(audit, start="latest")
    pacer = _EditPacer(play, wiring)
    try:
        pacer.unslowed_latencies = wiring.latencies.begin_scene()
        usual_count = await pacer.publish(edits, count // 4, UNSLOWED_S_MAX)
        await wiring.wait_settled()
        if not usual_count:
            console.line("  no document here can be linked to another; nothing was slowed")
            return
        usual_s = audit.slow_down(SLOWDOWN_FACTOR)
        console.line(
            f"  audit, a new sink, writes each delta as a JSON line: {usual_s * 1000:.2f} ms a delivery"
        )
        console.line(
            f"  in the first {usual_count:,} edits; from now on {SLOWDOWN_FACTOR * usual_s * 1000:.0f} ms"
        )
        pacer.slowed_latencies = wiring.latencies.begin_scene()
        slowed_count = await pacer.publish(edits, count, SLOWED_S_MAX)
        lag = wiring.lags()["audit"]
        started = play.timer.now()
    finally:
        audit.release()  # also after an error, because closing waits for the sink
    await wiring.wait_settled()
    caught_up_s = play.timer.now() - started
    pacer.show(is_last=True)
    pacer.report(lag, caught_up_s)
    play.facts["slow"] = {
        "slowdown_factor": SLOWDOWN_FACTOR,
        "usual_delivery_ms": round(usual_s * 1000, 3),
        "edits": usual_count + slowed_count,
        "lag": lag,
        "mailbox_deltas": pacer.mailbox_deltas,
        "mailbox_deltas_max": wiring.propagator.settings.mailbox_deltas_max,
        "mailbox_overflowed": pacer.mailbox_full_s is not None,
        "caught_up_s": round(caught_up_s, 3),
        "sinks": pacer.rows(),
    }


class _EditPacer:
    """Publishes edits one by one at a steady pace, and keeps a table of the sinks' lags and latencies."""

    def __init__(self, play: Play, wiring: Wiring) -> None:
        self._play, self._wiring = play, wiring
        self.unslowed_latencies: dict[str, list[float]] = {}  # by sink, in seconds
        self.slowed_latencies: dict[str, list[float]] = {}
        self.lags_max: dict[str, int] = {}
        self.mailbox_deltas = 0
        self.log_bytes = 0
        self.mailbox_full_s: float | None = None
        self._drawn_at = self._sampled_at = self._started_at = 0.0

    async def publish(self, edits: Iterator[Delta], count_max: int, duration_s_max: float) -> int:
        """Publish an edit every `EDIT_INTERVAL_S`, or as fast as possible; return the number of edits."""
        self._started_at = due = self._play.timer.now()
        self.lags_max.clear()
        count = 0
        for edit in islice(edits, count_max):
            await self._wiring.publish([edit])
            count += 1
            if not self._is_slowed:
                self._play.console.progress(count, count_max, "edits, at the usual pace")
            self._sample()
            due += EDIT_INTERVAL_S
            await anyio.sleep(max(0, due - self._play.timer.now()))
            if self._play.timer.now() - self._started_at > duration_s_max:
                break
        self._play.console.end_progress()
        return count

    @property
    def _is_slowed(self) -> bool:
        return self.slowed_latencies is self._wiring.latencies.of_scene

    def _sample(self) -> None:
        now = self._play.timer.now()
        if now - self._sampled_at < _SAMPLE_INTERVAL_S:
            return
        self._sampled_at = now
        statistics = self._wiring.propagator.statistics()
        for name, feed in statistics.sinks.items():
            self.lags_max[name] = max(self.lags_max.get(name, 0), feed.lag)
        self.log_bytes = max(self.log_bytes, statistics.log.bytes)
        audit = statistics.sinks["audit"]
        self.mailbox_deltas = max(self.mailbox_deltas, audit.mailbox_deltas)
        if self._is_slowed and audit.catching_up and self.mailbox_full_s is None:
            self.mailbox_full_s = now - self._started_at
        if self._is_slowed and now - self._drawn_at >= _DRAW_INTERVAL_S:
            self._drawn_at = now
            self.show()

    def show(self, *, is_last: bool = False) -> None:
        """Show the table: each sink's maximum lag, and its latencies before and while one sink is slowed."""
        console = self._play.console
        head = "  sink       lag, max   p50 ms  slowed   p99 ms  slowed   publish to visible"
        lines = [console.style("dim", head)]
        for name, row in self.rows().items():
            cells = [f"{'–' if value is None else f'{value:,.1f}':>7}" for value in list(row.values())[1:]]
            line = f"  {name:<10} {row['lag_max']:>8,}  {cells[0]} {cells[1]}  {cells[2]} {cells[3]}"
            lines.append(console.style("cyan", line) if name == "audit" else line)
        console.table(lines, is_last=is_last)

    def rows(self) -> dict[str, dict[str, float | None]]:
        """Return the table's numbers by sink: the maximum lag in deltas, and latencies in ms."""
        return {
            name: {
                "lag_max": self.lags_max.get(name, 0),
                "p50_ms": _rounded_quantile_ms(self.unslowed_latencies.get(name, ()), 0.5),
                "p50_slowed_ms": _rounded_quantile_ms(self.slowed_latencies.get(name, ()), 0.5),
                "p99_ms": _rounded_quantile_ms(self.unslowed_latencies.get(name, ()), 0.99),
                "p99_slowed_ms": _rounded_quantile_ms(self.slowed_latencies.get(name, ()), 0.99),
            }
            for name in self._wiring.sinks()
        }

    def report(self, lag: int, caught_up_s: float) -> None:
        """Show the slow sink's lag in deltas, and how fast the sink caught up."""
        console = self._play.console
        bound = self._wiring.propagator.settings.mailbox_deltas_max
        console.line(f"  audit lags by {lag:,} deltas; its mailbox takes up to {bound:,},")
        if self.mailbox_full_s is None:
            console.line("  which was enough: all of them waited in memory")
        else:
            log = self._wiring.propagator.statistics().log
            console.line(
                f"  was full after {self.mailbox_full_s:.1f} s, and the rest waited in the log: "
                f"{format_size(self.log_bytes)} of up to {format_size(log.bytes_max)}"
            )
        console.line(f"  released, it caught up within {caught_up_s * 1000:,.0f} ms")


async def crash_scene(play: Play, wiring: Wiring) -> None:
    """Kill a store in the middle of a batch, and let another one resume from the file that was left."""
    console = play.console
    count = min(5 * BATCH_EDITS_MAX, LINKS_PER_DOCUMENT_MAX * len(play.library.documents))
    edits = list(islice(_make_link_edits(play.library, count, distance=2), 4 * BATCH_EDITS_MAX))
    edits_per_batch = len(edits) // 4
    if not edits_per_batch:
        console.line("  no document here can be linked to another; nothing was killed")
        if edits:
            await wiring.publish(edits)  # all of them, since the library counts them as published
        return
    started = play.timer.now()
    crashing_sink = CrashingSink(StorageSink(play.workspace.replica, name="replica"), play.workspace)
    await wiring.propagator.attach(crashing_sink)
    await wiring.propagator.wait_visible(wiring.delta_count, sinks=["replica"], committed=True)
    took_s = play.timer.now() - started
    console.line(
        f"  replica, a second store, attached late: {crashing_sink.applied_end:,} deltas from the log to disk"
    )
    console.line(
        f"  in {took_s:.1f} s; then 3 batches of {edits_per_batch:,} edits, and it is killed within the third"
    )
    crashing_sink.kill_after(2 * edits_per_batch + edits_per_batch // 2)
    for start in range(0, 3 * edits_per_batch, edits_per_batch):
        await wiring.publish(edits[start : start + edits_per_batch])
        await anyio.sleep(BATCH_PAUSE_S)
    await _wait_until_stopped(wiring)
    await wiring.propagator.detach("replica")
    await wiring.publish(edits[3 * edits_per_batch :])
    await wiring.wait_settled()
    console.line(f"  {len(edits) - 3 * edits_per_batch:,} more edits while it is down: the others have them")
    await _restart_store(play, wiring, crashing_sink)


async def _restart_store(play: Play, wiring: Wiring, dead_sink: CrashingSink) -> None:
    console, started = play.console, play.timer.now()
    store = StorageSink(play.workspace.crashed_replica, name="replica")
    restarted = CrashingSink(store, play.workspace)
    await wiring.propagator.attach(restarted)
    wiring.replica = store
    await wiring.wait_settled()
    took_s = play.timer.now() - started
    redelivered = restarted.count_redelivered(dead_sink.applied_end)
    console.line(
        f"  it had applied all below offset {dead_sink.applied_end:,}, "
        f"written those below {restarted.resume_offset:,};"
    )
    console.line(
        f"  a new store opens its file: {redelivered:,} deltas are redelivered, "
        f"{wiring.delta_count - dead_sink.applied_end:,} are new;"
    )
    console.line(f"  all on disk after {took_s * 1000:,.0f} ms. None lost, none applied twice? See verify:")
    play.facts["crash"] = {
        "applied_end": dead_sink.applied_end,
        "resume_offset": restarted.resume_offset,
        "redelivered_deltas": redelivered,
        "new_deltas": wiring.delta_count - dead_sink.applied_end,
        "caught_up_s": round(took_s, 3),
    }


async def _wait_until_stopped(wiring: Wiring) -> None:
    """Wait until the replica has been killed: `wait_visible` for it is then refused."""
    try:
        await wiring.propagator.wait_visible(wiring.delta_count, sinks=["replica"])
    except Refused:
        return
    raise AssertionError("the replica has applied all deltas, but was to be killed")


def _make_link_edits(library: Library, count: int, distance: int = 1) -> Iterator[Delta]:
    """Yield up to `count` edits, spread over all documents: each makes a document say "see also" another one.

    `distance`: by how many positions the other document follows in the list of documents. The library counts
    each edit as published as soon as it is made, so publish every one.
    """
    ids = list(library.documents)
    step = max(len(ids) // count, 1)
    for number in range(count):
        index = number * step % len(ids)
        delta = library.link(ids[index], ids[(index + distance + number // len(ids)) % len(ids)])
        if delta is not None:
            yield delta


def _rounded_quantile_ms(latencies: Sequence[float], share: float) -> float | None:
    quantile = quantile_ms(latencies, share)
    return None if quantile is None else round(quantile, 3)
