"""The demo's last scenes: the verification of every sink, the table, and commands to try next.

They show the results of `verify.py` and the measurements of `wiring.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.demo.console import blank_unprintable, format_size
from delta_prop.demo.library import NAMESPACE, Library
from delta_prop.demo.verify import Verdict, corrupt, verify
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.demo.scenes import Play
    from delta_prop.demo.wiring import Wiring


async def verify_scene(play: Play, wiring: Wiring, corrupted: str | None) -> list[Verdict]:
    """Compare every sink with the published lines; first plant a fault in the sink `corrupted`, if given."""
    console = play.console
    await wiring.wait_settled()
    if corrupted is not None:
        if corrupted not in wiring.sinks():
            raise UsageError(
                f"--corrupt {corrupted}: no such sink, since no document here could be edited: choose another"
            )
        corrupt(corrupted, wiring, play.workspace, (NAMESPACE, _middle_document(play.library)))
        corruption = "one line was removed from" if corrupted == "audit" else "one wrong row was planted in"
        console.line(f"  {corruption} {corrupted}")
    verdicts = await verify(wiring, play.workspace)
    for verdict in verdicts:
        unit = "deltas" if verdict.sink in ("subscriber", "audit") else "rows"
        result = console.style("green", "identical")
        if not verdict.is_identical:
            result = (
                console.style("red", f"{verdict.wrong_count:,} WRONG")
                + f"  {blank_unprintable(verdict.fault)}"
            )
        console.line(f"  verify {verdict.sink:<10}  {verdict.row_count:>7,} {unit:<6}  {result}")
    play.facts["verify"] = {
        verdict.sink: "identical" if verdict.is_identical else blank_unprintable(verdict.fault)
        for verdict in verdicts
    }
    return verdicts


def end_scene(play: Play, wiring: Wiring, elapsed_s: float) -> None:
    """Show the totals, and a table of the sinks."""
    console, library = play.console, play.library
    statistics = wiring.propagator.statistics()
    console.line(
        f"  {len(library.documents):,} documents, {wiring.delta_count:,} deltas, "
        f"{format_size(wiring.number_bytes)}, {elapsed_s:.1f} s in all"
    )
    console.line(console.style("dim", "  sink          deltas     lag   publish to visible, p50"))
    sinks = {}
    for name in wiring.sinks():
        feed, p50_ms = statistics.sinks[name], wiring.latencies.p50_ms(name)
        latency = "–" if p50_ms is None else f"{p50_ms:.1f} ms"
        console.line(f"  {name:<10}  {feed.applied_deltas:>8,}  {feed.lag:>6,}   {latency:>23}")
        sinks[name] = {
            "deltas": feed.applied_deltas,
            "lag": feed.lag,
            "p50_ms": None if p50_ms is None else round(p50_ms, 3),
        }
    play.facts |= {
        "deltas": wiring.delta_count,
        "bytes": wiring.number_bytes,
        "elapsed_s": round(elapsed_s, 2),
        "sinks": sinks,
    }


def next_scene(play: Play) -> None:
    """Show commands to try next."""
    console, command = play.console, play.command
    console.line("  next:")
    console.line(f"  {command} demo                       edit and search by hand")
    console.line(f"  {command} demo --path DIR            the same with your own text")
    console.line(f"  {command} demo --once --corrupt index  plant a wrong row and see it found")


def _middle_document(library: Library) -> str:
    """Return the id of the document whose row is corrupted, from the middle of the list."""
    ids = list(library.documents)
    return ids[len(ids) // 2]
