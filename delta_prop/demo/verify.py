"""Verifies every sink against the fold of the published lines, and names the first row that differs.

It does not rely on a sink's own report: it reads each row from the SQLite file, the index and the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio.lowlevel

from delta_prop.demo.reference_fold import Fingerprint, Key, ReferenceFold, parse_logged_line

if TYPE_CHECKING:
    from delta_prop.demo.system import Workspace
    from delta_prop.demo.wiring import Wiring
    from delta_prop_wire.algebra import VectorState


LINES_PER_YIELD = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for one sink.

    `row_count`: the number of compared rows (of subscriber and audit: deltas). `fault`: the first difference;
    empty if there is none.
    """

    sink: str
    row_count: int
    wrong_count: int = 0
    fault: str = ""

    @property
    def is_identical(self) -> bool:
        """True if nothing differs."""
        return not self.fault


async def verify(wiring: Wiring, workspace: Workspace) -> list[Verdict]:
    """Return a verdict on every sink. Nothing may be published meanwhile."""
    await wiring.wait_settled()
    folded = ReferenceFold()
    for number, line in enumerate(workspace.read_published()):
        folded.add(line)
        if not number % LINES_PER_YIELD:
            await anyio.lowlevel.checkpoint()  # lets an interrupt through
    verdicts = []
    for sink in wiring.sinks():
        verdicts.append(await _verify_sink(sink, wiring, workspace, folded))
        await anyio.lowlevel.checkpoint()
    return verdicts


async def _verify_sink(sink: str, wiring: Wiring, workspace: Workspace, folded: ReferenceFold) -> Verdict:
    if sink == "subscriber":
        return compare_stream(sink, wiring.listener.offsets, wiring.listener.fingerprints, folded)
    if sink == "audit":
        offsets, fingerprints = [], []
        for offset, fingerprint in map(parse_logged_line, workspace.read_audit()):
            offsets.append(offset)
            fingerprints.append(fingerprint)
        return compare_stream(sink, offsets, fingerprints, folded, first=wiring.audit_start_offset)
    if sink == "index":
        return compare(sink, _alive_rows(wiring.index.rows()), folded)
    if sink == "cache":
        return compare(sink, _cached_rows(wiring, folded), folded)
    store = wiring.replica if sink == "replica" else wiring.storage
    assert store is not None
    stored = [row async for row in store.rows()]
    return compare(sink, _alive_rows(stored), folded)


def compare(sink: str, rows: Iterable[tuple[Key, list[float]]], folded: ReferenceFold) -> Verdict:
    """Compare rows with the fold: none missing, none extra, every number the same."""
    compared: set[Key] = set()
    wrong_count, fault = 0, ""
    for key, vector in rows:
        compared.add(key)
        expected = folded.vectors.get(key)
        if vector != expected:
            wrong_count += 1
            fault = fault or _describe_difference(key, vector, expected)
    missing = [key for key in folded.vectors if key not in compared]
    if missing:
        wrong_count += len(missing)
        fault = fault or f"{_format_key(missing[0])} is missing"
    return Verdict(sink, len(compared), wrong_count, fault)


def compare_stream(
    sink: str, offsets: Sequence[int], received: Sequence[Fingerprint], folded: ReferenceFold, first: int = 0
) -> Verdict:
    """Compare the deltas that a sink received with the lines from `first` on: all, each once, in order."""
    published = folded.fingerprints[first:]
    verdict = Verdict(sink, len(received))
    if list(offsets) != sorted(set(offsets)):
        return replace(
            verdict, wrong_count=1, fault="offsets do not ascend: a delta came twice or out of order"
        )
    wrong_count = abs(len(received) - len(published))
    wrong_count += sum(a != b for a, b in zip(received, published, strict=False))
    if not wrong_count:
        return verdict
    index = next((i for i, (a, b) in enumerate(zip(received, published, strict=False)) if a != b), None)
    if index is None:
        fault = f"{len(received):,} deltas came, {len(published):,} were published"
    else:
        expected, actual = published[index], received[index]
        fault = (
            f"delta {index:,} is {actual[1]} {_format_key(actual[0])}, "
            f"published was {expected[1]} {_format_key(expected[0])}"
        )
    return replace(verdict, wrong_count=wrong_count, fault=fault)


def corrupt(sink: str, wiring: Wiring, workspace: Workspace, key: Key) -> None:
    """Plant one wrong row in a sink, for the verification to find."""
    if sink == "subscriber":
        fingerprints = wiring.listener.fingerprints
        fingerprints[0], fingerprints[-1] = fingerprints[-1], fingerprints[0]
        return
    if sink == "audit":
        workspace.corrupt_audit()
        return
    namespace, vector_id = key
    table = wiring.index.resident.tables[namespace]
    assert table.matrix is not None
    row = table.matrix[table.slots[vector_id]]
    cached = wiring.cache.peek(namespace, vector_id)
    assert cached is not None
    assert cached.vector is not None
    if sink in ("storage", "replica"):
        store = workspace.store if sink == "storage" else workspace.crashed_replica
        workspace.corrupt_store(store, namespace, vector_id, [row[0].item() + 1, *row[1:].tolist()])
    elif sink == "index":
        row[0] += 1
    else:
        cached.vector[0] += 1


def _alive_rows(rows: Iterable[tuple[str, str, VectorState]]) -> Iterator[tuple[Key, list[float]]]:
    for namespace, vector_id, state in rows:
        if state.alive:
            yield (namespace, vector_id), [] if state.vector is None else state.vector.tolist()


def _cached_rows(wiring: Wiring, folded: ReferenceFold) -> Iterator[tuple[Key, list[float]]]:
    """Yield the published vectors that the cache holds; then one row if it has entries of other vectors."""
    entry_count = 0
    for key in {fingerprint[0]: None for fingerprint in folded.fingerprints}:
        state = wiring.cache.peek(*key)
        entry_count += state is not None
        if state is not None and state.alive:
            yield key, [] if state.vector is None else state.vector.tolist()
    entries = wiring.cache.statistics().entries
    if entries != entry_count:
        yield ("", f"one of {entries - entry_count} entries of vectors that were never published"), []


def _describe_difference(key: Key, vector: list[float], expected: list[float] | None) -> str:
    if expected is None:
        return f"{_format_key(key)} exists, but was not published"
    if len(vector) != len(expected):
        return f"{_format_key(key)} has {len(vector):,} numbers, published were {len(expected):,}"
    index = next(i for i, (a, b) in enumerate(zip(vector, expected, strict=True)) if a != b)
    return f"{_format_key(key)}: number {index} is {vector[index]:g}, published was {expected[index]:g}"


def _format_key(key: Key) -> str:
    return "/".join(key)
