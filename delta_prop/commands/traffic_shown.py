"""`trace show`: what a recording of traffic holds, in numbers.

It reads once, and holds counts alone: of distinct vectors it keeps the smallest hashes, which tell how many
there are, exactly while there are few.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.commands import edge
from delta_prop.dates import shown_time
from delta_prop.recorded_traffic import RecordedTraffic
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from delta_prop.recorded_traffic import RecordedBatch

OK = 0
HASHES_MAX = 65_536
"""Up to so many distinct vectors are counted, of more their number is estimated, to about half a percent."""
_SECOND_US = 1_000_000
_COUNTS_MAX = 4096


def show(path: str, *, as_json: bool) -> int:
    """Print it. Raises UsageError where the file is no recording."""
    traffic = RecordedTraffic(lambda: edge.file_pieces(path), repr(path))
    summary = Summary()
    for batch in traffic.batches():
        summary.add(batch)
    told = summary.told()
    told["began"] = shown_time(traffic.began_us)
    told["ended"] = None if traffic.ended_us is None else shown_time(traffic.ended_us)
    told["whole"] = traffic.fault is None
    if as_json:
        edge.put(json.dumps(told))
    else:
        edge.put_all(iter(_lines(told)))
    if traffic.fault is not None:
        edge.note(traffic.fault)
    return OK


class Summary:
    """Counts of a recording."""

    def __init__(self) -> None:
        self._batches = self._deltas = self._bytes = 0
        self._first_us: int | None = None
        self._last_us = 0
        self._busiest = self._in_second = self._second = 0
        self._operations: Counter[int] = Counter()
        self._priorities: Counter[str] = Counter()
        self._rows: Counter[int] = Counter()
        self._sizes = np.zeros(64, np.int64)
        self._origins: set[int] = set()
        self._smallest = np.zeros(0, np.uint64)
        self._waiting: list[Any] = []
        self._unmerged = 0

    def add(self, batch: RecordedBatch) -> None:
        """Count one more."""
        self._first_us = batch.time_us if self._first_us is None else self._first_us
        self._last_us = batch.time_us
        self._batches += 1
        self._deltas += batch.count
        self._bytes += int(batch.sizes.sum())
        self._operations.update(batch.kinds)
        self._priorities[batch.priority.name.lower()] += batch.count
        self._rows[(batch.count - 1).bit_length()] += 1
        self._sizes += np.bincount(np.frexp(batch.sizes.astype(np.float64))[1], minlength=64)
        if len(self._origins) < _COUNTS_MAX:
            self._origins.add(batch.origin)
        self._count_second(batch)
        self._waiting.append(batch.keys)
        self._unmerged += batch.count
        if self._unmerged >= HASHES_MAX:
            self._merge()

    def told(self) -> dict[str, Any]:
        """What there was."""
        self._merge()
        told: dict[str, Any] = {"batches": self._batches, "deltas": self._deltas, "bytes": self._bytes}
        if self._first_us is None:
            return told
        span_s = (self._last_us - self._first_us) / _SECOND_US
        told |= {"first": shown_time(self._first_us), "last": shown_time(self._last_us)}
        told |= {"span_s": round(span_s, 3), "deltas_per_s": round(self._deltas / max(span_s, 1.0), 1)}
        told |= {"busiest_second": max(self._busiest, self._in_second)}
        told |= {
            "deltas_a_batch_p50": self._at(self._rows, 0.5),
            "deltas_a_batch_p99": self._at(self._rows, 0.99),
        }
        sizes = {bits: int(count) for bits, count in enumerate(self._sizes) if count}
        told |= {"delta_bytes_p50": self._at(sizes, 0.5), "delta_bytes_p99": self._at(sizes, 0.99)}
        told |= {"vectors": self._vectors(), "origins": len(self._origins)}
        told["operations"] = {kind_name(kind): count for kind, count in sorted(self._operations.items())}
        told["priorities"] = dict(sorted(self._priorities.items()))
        return told

    def _count_second(self, batch: RecordedBatch) -> None:
        second = batch.time_us // _SECOND_US
        if second != self._second:
            self._busiest = max(self._busiest, self._in_second)
            self._second, self._in_second = second, 0
        self._in_second += batch.count

    def _merge(self) -> None:
        found = np.unique(np.concatenate([self._smallest, *self._waiting]))
        self._smallest, self._waiting = found[:HASHES_MAX], []
        self._unmerged = 0

    def _vectors(self) -> int:
        count = len(self._smallest)
        if count < HASHES_MAX:
            return count
        return round((count - 1) / (float(self._smallest[-1]) / 2.0**64))

    @staticmethod
    def _at(counts: dict[int, int], share: float) -> int:
        """What so many of them have at most, as a power of two."""
        left = share * sum(counts.values())
        for bits, count in sorted(counts.items()):
            left -= count
            if left <= 0:
                return 1 << bits
        return 1 << max(counts)


def _lines(told: dict[str, Any]) -> list[str]:
    lines = [f"{told['deltas']:,} deltas in {told['batches']:,} batches, {told['bytes']:,} bytes of content"]
    if "first" not in told:
        return lines
    lines.append(
        f"from {told['first']} to {told['last']}: {told['deltas_per_s']:,} deltas a second, "
        f"{told['busiest_second']:,} in the busiest one"
    )
    lines.append(
        f"a batch has up to {told['deltas_a_batch_p50']} deltas (99 %: {told['deltas_a_batch_p99']}), "
        f"a delta up to {told['delta_bytes_p50']} bytes (99 %: {told['delta_bytes_p99']})"
    )
    lines.append(f"{told['vectors']:,} vectors, {told['origins']:,} origins")
    for what in ("operations", "priorities"):
        lines.append(f"{what}: " + ", ".join(f"{name} {count:,}" for name, count in told[what].items()))
    return lines
