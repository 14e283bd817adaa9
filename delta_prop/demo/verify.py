"""Compares what every sink holds with what the published lines fold to, and says which row differs.

It trusts no sink's own account: rows are read out of the SQLite file, the index and the cache, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio.lowlevel

from delta_prop.demo.published import Folded, logged_mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from delta_prop.demo.edge import Place
    from delta_prop.demo.published import Key, Mark
    from delta_prop.demo.wiring import Wiring
    from delta_prop_wire.algebra import State


LINES_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sink: how many rows (for the subscriber: deltas) were compared, and the first that differs."""

    sink: str
    rows: int
    wrong: int = 0
    fault: str = ""

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return not self.fault


async def verify(wiring: Wiring, place: Place) -> list[Verdict]:
    """A verdict on every sink. Nothing may be published meanwhile."""
    await wiring.settled()
    folded = Folded()
    for number, line in enumerate(place.lines()):
        folded.add(line)
        if not number % LINES_AT_ONCE:
            await anyio.lowlevel.checkpoint()  # an interrupt has to get through
    verdicts = []
    for sink in wiring.sinks():
        verdicts.append(await _verdict(sink, wiring, place, folded))
        await anyio.lowlevel.checkpoint()
    return verdicts


async def _verdict(sink: str, wiring: Wiring, place: Place, folded: Folded) -> Verdict:
    if sink == "subscriber":
        return compare_stream(sink, wiring.listener.offsets, wiring.listener.marks, folded)
    if sink == "audit":
        offsets, marks = [], []
        for offset, mark in map(logged_mark, place.audited()):
            offsets.append(offset)
            marks.append(mark)
        return compare_stream(sink, offsets, marks, folded, first=wiring.audit_from)
    if sink == "index":
        return compare(sink, _alive(wiring.index.rows()), folded)
    if sink == "cache":
        return compare(sink, _cached(wiring, folded), folded)
    store = wiring.replica if sink == "replica" else wiring.storage
    assert store is not None
    stored = [row async for row in store.rows()]
    return compare(sink, _alive(stored), folded)


def compare(sink: str, rows: Iterable[tuple[Key, list[float]]], folded: Folded) -> Verdict:
    """Rows against the fold: none missing, none too many, every number the same."""
    seen: set[Key] = set()
    wrong, fault = 0, ""
    for key, vector in rows:
        seen.add(key)
        expected = folded.vectors.get(key)
        if vector != expected:
            wrong += 1
            fault = fault or _difference(key, vector, expected)
    missing = [key for key in folded.vectors if key not in seen]
    if missing:
        wrong += len(missing)
        fault = fault or f"{_name(missing[0])} is missing"
    return Verdict(sink, len(seen), wrong, fault)


def compare_stream(
    sink: str, offsets: Sequence[int], got: Sequence[Mark], folded: Folded, first: int = 0
) -> Verdict:
    """What a sink of deltas got against the lines from the `first` on: each once, in order, whole."""
    published = folded.marks[first:]
    verdict = Verdict(sink, len(got))
    if list(offsets) != sorted(set(offsets)):
        return replace(verdict, wrong=1, fault="offsets do not rise: a delta came twice or out of order")
    wrong = sum(a != b for a, b in zip(got, published, strict=False)) + abs(len(got) - len(published))
    if not wrong:
        return verdict
    at = next((i for i, (a, b) in enumerate(zip(got, published, strict=False)) if a != b), None)
    if at is None:
        fault = f"{len(got):,} deltas came, {len(published):,} were published"
    else:
        mine, its = published[at], got[at]
        fault = f"delta {at:,} is {its[1]} {_name(its[0])}, published was {mine[1]} {_name(mine[0])}"
    return replace(verdict, wrong=wrong, fault=fault)


def spoil(sink: str, wiring: Wiring, place: Place, key: Key) -> None:
    """Plant one wrong row in a sink, so that one can see it found."""
    if sink == "subscriber":
        marks = wiring.listener.marks
        marks[0], marks[-1] = marks[-1], marks[0]
        return
    if sink == "audit":
        place.spoil_audit()
        return
    namespace, vector_id = key
    table = wiring.index.resident.tables[namespace]
    assert table.matrix is not None
    row = table.matrix[table.slots[vector_id]]
    cached = wiring.cache.peek(namespace, vector_id)
    assert cached is not None
    assert cached.vector is not None
    if sink in ("storage", "replica"):
        store = place.store if sink == "storage" else place.left
        place.spoil_store(store, namespace, vector_id, [row[0].item() + 1, *row[1:].tolist()])
    elif sink == "index":
        row[0] += 1
    else:
        cached.vector[0] += 1


def _alive(rows: Iterable[tuple[str, str, State]]) -> Iterator[tuple[Key, list[float]]]:
    for namespace, vector_id, state in rows:
        if state.alive:
            yield (namespace, vector_id), [] if state.vector is None else state.vector.tolist()


def _cached(wiring: Wiring, folded: Folded) -> Iterator[tuple[Key, list[float]]]:
    """A cache is asked by key; what it holds beyond the published vectors shows in its count."""
    alive = 0
    for key in {mark[0]: None for mark in folded.marks}:
        state = wiring.cache.peek(*key)
        alive += state is not None
        if state is not None and state.alive:
            yield key, [] if state.vector is None else state.vector.tolist()
    entries = wiring.cache.statistics().entries
    if entries != alive:
        yield ("", f"one of {entries - alive} entries of vectors that were never published"), []


def _difference(key: Key, vector: list[float], expected: list[float] | None) -> str:
    if expected is None:
        return f"{_name(key)} is there, but what was published does not make it"
    if len(vector) != len(expected):
        return f"{_name(key)} has {len(vector):,} numbers, published were {len(expected):,}"
    at = next(i for i, (a, b) in enumerate(zip(vector, expected, strict=True)) if a != b)
    return f"{_name(key)}: number {at} is {vector[at]:g}, published was {expected[at]:g}"


def _name(key: Key) -> str:
    return "/".join(key)
