"""The demo's hard scenes: a sink that is slowed, and one that is killed in the middle of a batch.

What is published meanwhile are real edits, recorded as all others are. They add instead of setting, so
that a delta that is lost, or applied twice, leaves a wrong number for the check to find.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import anyio

from delta_prop.demo.console import size
from delta_prop.demo.mistreated import Mortal, Slowed
from delta_prop.demo.wiring import quantile_ms
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop.demo.library import Library
    from delta_prop.demo.scenes import Play
    from delta_prop.demo.wiring import Wiring
    from delta_prop_wire.delta import Delta

SLOWER = 100
EDITS = 800
PAUSE_S = 0.0025
BEFORE_S_MAX, DURING_S_MAX = 1.0, 2.5
BATCH = 100
LINKS_A_DOCUMENT_MAX = 8
BATCHES_PAUSE_S = 0.03
_SHOWN_S = 0.1
_SEEN_S = 0.02


async def slow_scene(play: Play, wiring: Wiring) -> None:
    """Slow one sink down while edits go on; show what that does to it, and to the others."""
    console = play.console
    count = min(EDITS, LINKS_A_DOCUMENT_MAX * len(play.library.documents))
    edits = _links(play.library, count)
    audit = Slowed(JsonLinesSink(play.place.audit, name="audit"), play.now)
    wiring.audit_from = wiring.deltas
    await wiring.propagator.attach(audit, start="latest")
    pace = _Pace(play, wiring)
    try:
        pace.before = wiring.measure_anew()
        some = await pace.publish(edits, count // 4, BEFORE_S_MAX)
        await wiring.settled()
        if not some:
            console.line("  no document here can be linked to another; nothing was slowed")
            return
        usual_s = audit.slow_down(SLOWER)
        console.line(
            f"  audit, a new sink, writes each delta as a JSON line: {usual_s * 1000:.2f} ms a delivery"
        )
        console.line(f"  in the first {some:,} edits; from now on {SLOWER * usual_s * 1000:.0f} ms")
        pace.during = wiring.measure_anew()
        more = await pace.publish(edits, count, DURING_S_MAX)
        behind = wiring.lags()["audit"]
        started = play.now()
    finally:
        audit.let_go()  # whatever happens: closing waits for it
    await wiring.settled()
    caught_up_s = play.now() - started
    pace.show(last=True)
    pace.tell(behind, caught_up_s)
    play.facts["slow"] = {
        "slower": SLOWER,
        "usual_ms": round(usual_s * 1000, 3),
        "edits": some + more,
        "behind": behind,
        "mailbox_deltas": pace.mailbox_deltas,
        "mailbox_deltas_max": wiring.propagator.settings.mailbox_deltas_max,
        "read_the_log": pace.full_s is not None,
        "caught_up_s": round(caught_up_s, 3),
        "sinks": pace.rows(),
    }


class _Pace:
    """Publishes edits one by one, evenly, and keeps a table of what that looks like."""

    def __init__(self, play: Play, wiring: Wiring) -> None:
        self._play, self._wiring = play, wiring
        self.before: dict[str, list[float]] = {}
        self.during: dict[str, list[float]] = {}
        self.lags_max: dict[str, int] = {}
        self.mailbox_deltas = 0
        self.log_bytes = 0
        self.full_s: float | None = None
        self._shown_at = self._seen_at = self._started = 0.0

    async def publish(self, edits: Iterator[Delta], count_max: int, s_max: float) -> int:
        """An edit each 2.5 ms, or as fast as this machine can where that is slower; how many those were."""
        self._started = due = self._play.now()
        self.lags_max.clear()
        count = 0
        for edit in islice(edits, count_max):
            await self._wiring.publish([edit])
            count += 1
            if not self._slowed:
                self._play.console.progress(count, count_max, "edits, at the usual pace")
            self._see()
            due += PAUSE_S
            await anyio.sleep(max(0, due - self._play.now()))
            if self._play.now() - self._started > s_max:
                break
        self._play.console.progress_done()
        return count

    @property
    def _slowed(self) -> bool:
        return self.during is self._wiring.scene_latencies

    def _see(self) -> None:
        now = self._play.now()
        if now - self._seen_at < _SEEN_S:
            return
        self._seen_at = now
        statistics = self._wiring.propagator.statistics()
        for name, one in statistics.sinks.items():
            self.lags_max[name] = max(self.lags_max.get(name, 0), one.lag)
        self.log_bytes = max(self.log_bytes, statistics.log.bytes)
        audit = statistics.sinks["audit"]
        self.mailbox_deltas = max(self.mailbox_deltas, audit.mailbox_deltas)
        if self._slowed and audit.behind and self.full_s is None:
            self.full_s = now - self._started
        if self._slowed and now - self._shown_at >= _SHOWN_S:
            self._shown_at = now
            self.show()

    def show(self, *, last: bool = False) -> None:
        """The table: how far behind, and from publish to visible, each sink before and while one is slow."""
        console = self._play.console
        head = "  sink         behind   p50 ms  slowed   p99 ms  slowed   publish to visible"
        lines = [console.style("dim", head)]
        for name, row in self.rows().items():
            told = [f"{'–' if one is None else f'{one:,.1f}':>7}" for one in list(row.values())[1:]]
            line = f"  {name:<10} {row['behind']:>8,}  {told[0]} {told[1]}  {told[2]} {told[3]}"
            lines.append(console.style("cyan", line) if name == "audit" else line)
        console.table(lines, last=last)

    def rows(self) -> dict[str, dict[str, float | None]]:
        """The table's numbers: deltas, and ms."""
        return {
            name: {
                "behind": self.lags_max.get(name, 0),
                "p50_ms": _rounded(self.before.get(name, ()), 0.5),
                "p50_slowed_ms": _rounded(self.during.get(name, ()), 0.5),
                "p99_ms": _rounded(self.before.get(name, ()), 0.99),
                "p99_slowed_ms": _rounded(self.during.get(name, ()), 0.99),
            }
            for name in self._wiring.sinks()
        }

    def tell(self, behind: int, caught_up_s: float) -> None:
        """What became of the slow sink, in words."""
        console = self._play.console
        bound = self._wiring.propagator.settings.mailbox_deltas_max
        console.line(f"  audit fell {behind:,} deltas behind; its mailbox takes {bound:,} at most,")
        if self.full_s is None:
            console.line("  which was enough: the service's memory holds what it has not come to yet")
        else:
            log = self._wiring.propagator.statistics().log
            console.line(
                f"  was full after {self.full_s:.1f} s, and the rest waited in the log: "
                f"{size(self.log_bytes)} of {size(log.bytes_max)} at most"
            )
        console.line(f"  let go, it caught up within {caught_up_s * 1000:,.0f} ms")


async def crash_scene(play: Play, wiring: Wiring) -> None:
    """Kill a store in the middle of a batch, and let another one go on with the file that it left."""
    console = play.console
    count = min(5 * BATCH, LINKS_A_DOCUMENT_MAX * len(play.library.documents))
    edits = list(islice(_links(play.library, count, further=2), 4 * BATCH))
    batch = len(edits) // 4
    if not batch:
        console.line("  no document here can be linked to another; nothing was killed")
        if edits:
            await wiring.publish(edits)  # the library takes them for published
        return
    started = play.now()
    doomed = Mortal(StorageSink(play.place.replica, name="replica"), play.place.leave_replica)
    await wiring.propagator.attach(doomed)
    await wiring.propagator.wait_visible(wiring.deltas, sinks=["replica"], committed=True)
    took_s = play.now() - started
    console.line(f"  replica, a second store, comes late: {doomed.in_hand:,} deltas from the log to its disk")
    console.line(f"  in {took_s:.1f} s; then 3 batches of {batch:,} edits, and it is killed within the third")
    doomed.kill_after(2 * batch + batch // 2)
    for at in range(0, 3 * batch, batch):
        await wiring.publish(edits[at : at + batch])
        await anyio.sleep(BATCHES_PAUSE_S)
    await _stopped(wiring)
    await wiring.propagator.detach("replica")
    await wiring.publish(edits[3 * batch :])
    await wiring.settled()
    console.line(f"  {len(edits) - 3 * batch:,} more edits while it is gone: the others have them")
    await _come_back(play, wiring, doomed)


async def _come_back(play: Play, wiring: Wiring, dead: Mortal) -> None:
    console, started = play.console, play.now()
    store = StorageSink(play.place.left, name="replica")
    heir = Mortal(store)
    await wiring.propagator.attach(heir)
    wiring.replica = store
    await wiring.settled()
    took_s = play.now() - started
    again = heir.again(dead.in_hand)
    console.line(
        f"  it had everything below offset {dead.in_hand:,} in hand, below {heir.resumed_at:,} in its file;"
    )
    console.line(
        f"  a new store opens what was left: {again:,} deltas come again, "
        f"{wiring.deltas - dead.in_hand:,} are new;"
    )
    console.line(
        f"  all on disk after {took_s * 1000:,.0f} ms. None lost, none applied twice? Its numbers tell:"
    )
    play.facts["crash"] = {
        "in_hand": dead.in_hand,
        "durable": heir.resumed_at,
        "came_again": again,
        "came_first": wiring.deltas - dead.in_hand,
        "caught_up_s": round(took_s, 3),
    }


async def _stopped(wiring: Wiring) -> None:
    """Wait until the replica is dead; the service's log says so."""
    try:
        await wiring.propagator.wait_visible(wiring.deltas, sinks=["replica"])
    except Refused:
        return
    raise AssertionError("the replica was to be killed, and has applied everything")


def _links(library: Library, count: int, further: int = 1) -> Iterator[Delta]:
    """So many edits at most, spread over all documents: each lets one say "see also" a later one.

    The library takes each for published as soon as it is made, so publish every one.
    """
    ids = list(library.documents)
    step = max(len(ids) // count, 1)
    for number in range(count):
        at = number * step % len(ids)
        delta = library.link(ids[at], ids[(at + further + number // len(ids)) % len(ids)])
        if delta is not None:
            yield delta


def _rounded(measured: Sequence[float], part: float) -> float | None:
    found = quantile_ms(measured, part)
    return None if found is None else round(found, 3)
