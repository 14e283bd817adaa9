"""`trace show`: summarizes a recording of traffic.

It reads the file once and stores only counts. The number of distinct vectors is exact below HASHES_MAX, and
else estimated from the smallest hashes of their names.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.directory.recorded_traffic import RecordedBatch, RecordedTraffic
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0
HASHES_MAX = 65_536
"""From this many distinct vectors on, their number is an estimate, accurate to about half a percent."""
_SECOND_US = 1_000_000
_COUNTS_MAX = 4096


def show_trace(options: Namespace) -> int:
    """Print the summary of a recording. Raises UsageError if the file is not a recording."""
    traffic = RecordedTraffic(system.FileChunks(options.file), repr(options.file))
    summary = Summary()
    for batch in traffic.batches():
        summary.add(batch)
    fields = summary.to_json()
    fields["began"] = format_time(traffic.began_us)
    fields["ended"] = None if traffic.ended_us is None else format_time(traffic.ended_us)
    fields["whole"] = traffic.fault is None
    if options.json:
        system.put(json.dumps(fields))
    else:
        system.put_all(iter(_format_lines(fields)))
    if traffic.fault is not None:
        system.note(traffic.fault)
    return OK


class _BusiestSecond:
    """The deltas of the second with the most, of batches in the order of their times."""

    def __init__(self) -> None:
        self._second = self._deltas = self._deltas_max = 0

    @property
    def deltas(self) -> int:
        """The number of deltas in the busiest second so far."""
        return max(self._deltas_max, self._deltas)

    def add(self, batch: RecordedBatch) -> None:
        """Count a batch."""
        second = batch.time_us // _SECOND_US
        if second != self._second:
            self._deltas_max = self.deltas
            self._second, self._deltas = second, 0
        self._deltas += batch.count


class _DistinctKeys:
    """Estimates the number of distinct keys, from the smallest of their hashes."""

    def __init__(self) -> None:
        self._smallest_hashes = np.zeros(0, np.uint64)
        self._unmerged_keys: list[Any] = []
        self._unmerged_count = 0

    def add(self, batch: RecordedBatch) -> None:
        """Add the keys of a batch."""
        self._unmerged_keys.append(batch.keys)
        self._unmerged_count += batch.count
        if self._unmerged_count >= HASHES_MAX:
            self._merge()

    def estimate(self) -> int:
        """Return the estimate; below HASHES_MAX it is exact."""
        self._merge()
        count = len(self._smallest_hashes)
        if count < HASHES_MAX:
            return count
        return round((count - 1) / (float(self._smallest_hashes[-1]) / 2.0**64))

    def _merge(self) -> None:
        hashes = np.unique(np.concatenate([self._smallest_hashes, *self._unmerged_keys]))
        self._smallest_hashes, self._unmerged_keys = hashes[:HASHES_MAX], []
        self._unmerged_count = 0


class Summary:
    """Counts of a recording.

    `_rows` and `_sizes` count batches by their rows, and deltas by their bytes, in powers of two: the key, or
    the index, is the exponent.
    """

    def __init__(self) -> None:
        self._batches = self._deltas = self._bytes = 0
        self._first_us: int | None = None
        self._last_us = 0
        self._busiest_second = _BusiestSecond()
        self._operations: Counter[int] = Counter()
        self._priorities: Counter[str] = Counter()
        self._rows: Counter[int] = Counter()
        self._sizes = np.zeros(64, np.int64)
        self._origins: set[int] = set()
        self._vectors = _DistinctKeys()

    def add(self, batch: RecordedBatch) -> None:
        """Count a batch."""
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
        self._busiest_second.add(batch)
        self._vectors.add(batch)

    def to_json(self) -> dict[str, Any]:
        """Return the counts."""
        fields: dict[str, Any] = {"batches": self._batches, "deltas": self._deltas, "bytes": self._bytes}
        if self._first_us is None:
            return fields
        span_s = (self._last_us - self._first_us) / _SECOND_US
        fields |= {"first": format_time(self._first_us), "last": format_time(self._last_us)}
        fields |= {"span_s": round(span_s, 3), "deltas_per_s": round(self._deltas / max(span_s, 1.0), 1)}
        fields |= {"busiest_second": self._busiest_second.deltas}
        sizes = {bits: int(count) for bits, count in enumerate(self._sizes) if count}
        for name, counts in (("deltas_per_batch", self._rows), ("delta_bytes", sizes)):
            fields |= {f"{name}_p{share}": self._quantile(counts, share / 100) for share in (50, 99)}
        fields |= {"vectors": self._vectors.estimate(), "origins": len(self._origins)}
        fields["operations"] = {kind_name(kind): count for kind, count in sorted(self._operations.items())}
        fields["priorities"] = dict(sorted(self._priorities.items()))
        return fields

    @staticmethod
    def _quantile(counts: dict[int, int], share: float) -> int:
        """Return the power of two that this share of the values does not exceed."""
        remaining = share * sum(counts.values())
        for bits, count in sorted(counts.items()):
            remaining -= count
            if remaining <= 0:
                return 1 << bits
        return 1 << max(counts)


def _format_lines(summary: dict[str, Any]) -> list[str]:
    lines = [
        f"{summary['deltas']:,} deltas in {summary['batches']:,} batches, "
        f"{summary['bytes']:,} bytes of content"
    ]
    if "first" not in summary:
        return lines
    lines.append(
        f"from {summary['first']} to {summary['last']}: {summary['deltas_per_s']:,} deltas per second, "
        f"{summary['busiest_second']:,} in the busiest one"
    )
    lines.append(
        f"a batch has up to {summary['deltas_per_batch_p50']} deltas "
        f"(99 %: {summary['deltas_per_batch_p99']}), "
        f"a delta up to {summary['delta_bytes_p50']} bytes (99 %: {summary['delta_bytes_p99']})"
    )
    lines.append(f"{summary['vectors']:,} vectors, {summary['origins']:,} origins")
    for key in ("operations", "priorities"):
        lines.append(f"{key}: " + ", ".join(f"{name} {count:,}" for name, count in summary[key].items()))
    return lines
