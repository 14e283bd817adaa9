"""The demo's last scenes: the check of every sink, the table, what to try next.

It shows what `verify.py` found and what `wiring.py` measured; it judges nothing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.demo.console import printable, size
from delta_prop.demo.library import NAMESPACE, Library
from delta_prop.demo.verify import Verdict, spoil, verify
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.demo.scenes import Play
    from delta_prop.demo.wiring import Wiring


async def verify_scene(play: Play, wiring: Wiring, spoiled: str | None) -> list[Verdict]:
    """Compare every sink with the published lines; first plant a wrong row, if that was asked for."""
    console = play.console
    await wiring.settled()
    if spoiled is not None:
        if spoiled not in wiring.sinks():
            raise UsageError(f"--spoil {spoiled}: there was nothing to edit here, so there is no such sink")
        spoil(spoiled, wiring, play.place, (NAMESPACE, _middle(play.library)))
        told = "one line was taken out of" if spoiled == "audit" else "one wrong row was planted in"
        console.line(f"  {told} {spoiled}")
    verdicts = await verify(wiring, play.place)
    for verdict in verdicts:
        unit = "deltas" if verdict.sink in ("subscriber", "audit") else "rows"
        told = console.style("green", "identical")
        if not verdict.identical:
            told = console.style("red", f"{verdict.wrong:,} WRONG") + f"  {printable(verdict.fault)}"
        console.line(f"  verify {verdict.sink:<10}  {verdict.rows:>7,} {unit:<6}  {told}")
    play.facts["verify"] = {
        one.sink: "identical" if one.identical else printable(one.fault) for one in verdicts
    }
    return verdicts


def end_scene(play: Play, wiring: Wiring, elapsed_s: float) -> None:
    """What happened, in one table, and what one may do next."""
    console, library = play.console, play.library
    statistics = wiring.propagator.statistics()
    console.line(
        f"  {len(library.documents):,} documents, {wiring.deltas:,} deltas, {size(wiring.number_bytes)}, "
        f"{elapsed_s:.1f} s in all"
    )
    console.line(console.style("dim", "  sink          deltas     lag   publish to visible, p50"))
    sinks = {}
    for name in wiring.sinks():
        one, p50_ms = statistics.sinks[name], wiring.p50_ms(name)
        told = "–" if p50_ms is None else f"{p50_ms:.1f} ms"
        console.line(f"  {name:<10}  {one.success:>8,}  {one.lag:>6,}   {told:>23}")
        sinks[name] = {
            "deltas": one.success,
            "lag": one.lag,
            "p50_ms": None if p50_ms is None else round(p50_ms, 3),
        }
    play.facts |= {
        "deltas": wiring.deltas,
        "bytes": wiring.number_bytes,
        "elapsed_s": round(elapsed_s, 2),
        "sinks": sinks,
    }


def next_scene(play: Play) -> None:
    """Commands that one may try next."""
    console, command = play.console, play.command
    console.line("  next:")
    console.line(f"  {command} demo                       edit and search by hand")
    console.line(f"  {command} demo --path DIR            the same with your own text")
    console.line(f"  {command} demo --once --spoil index  plant a wrong row and see it found")


def _middle(library: Library) -> str:
    """Any document will do to be spoiled, but one has to be."""
    ids = list(library.documents)
    return ids[len(ids) // 2]
