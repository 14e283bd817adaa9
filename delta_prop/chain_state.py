"""The chain's state as bytes, for a checkpoint, and back. Pure.

Small things stand in one section. What grows lies in parts that are written once: *changes* (origins and
heads that moved since the checkpoint before, or all of them), *ids* that were added since, sealed
*generations* of ids. Read in their order they give the state.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from delta_prop.ingest.heads import unpack_heads
from delta_prop.ingest.origins import OriginState, SavedOrigin
from delta_prop.ingest.seen_ids import SavedGeneration
from delta_prop.ingest.vectors import SavedVectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Columns = tuple[array[int], array[int], array[int]]

    from delta_prop.ingest.seen_ids import Generation

SECTION = "chain"
VERSION = 1
_ACTIVE, _FORGOT = 1, 2
_ID_BYTES, _WORD_BYTES = 16, 8


class OriginRow(NamedTuple):
    """One origin at one moment: watermark, epoch; `saved` and `clock` are None where it is put aside."""

    origin: int
    watermark: int
    epoch: int
    saved: SavedOrigin | None
    clock: dict[int, int]


@dataclass(slots=True)
class Small:
    """What is small, and which parts hold the rest, in the order to read them."""

    lamport: int = 0
    hybrid_time: int = 0
    kept_since: int = 0
    forgotten: int = 0
    vectors: SavedVectors = field(default_factory=lambda: SavedVectors((), {}, complete=True))
    changes: list[str] = field(default_factory=list)
    ids: list[tuple[str, int]] = field(default_factory=list)  # part, last offset in it
    generations: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(part, ids, ids that its filter is made for, last offset)"""

    def pack(self) -> bytes:
        """The section's bytes."""
        told = {
            "version": VERSION,
            "lamport": self.lamport,
            "hybrid_time": self.hybrid_time,
            "kept_since": self.kept_since,
            "forgotten": self.forgotten,
            "writers": _bytes(self.vectors.writers),
            "namespaces": self.vectors.namespaces,
            "complete": self.vectors.complete,
            "changes": self.changes,
            "ids": self.ids,
            "generations": self.generations,
        }
        return bytes(msgpack.packb(told))

    @classmethod
    def unpack(cls, raw: bytes) -> Small:
        """Read a section. Raises ValueError where it is of another version."""
        told = msgpack.unpackb(raw)
        if told["version"] != VERSION:
            raise ValueError(f"the chain's state has version {told['version']}, this program knows {VERSION}")
        return cls(
            told["lamport"],
            told["hybrid_time"],
            told["kept_since"],
            told["forgotten"],
            SavedVectors(
                tuple(_array(told["writers"])),
                {name: (dimension, complete) for name, (dimension, complete) in told["namespaces"].items()},
                told["complete"],
            ),
            told["changes"],
            [(name, last) for name, last in told["ids"]],
            [(name, count, filter_ids, last) for name, count, filter_ids, last in told["generations"]],
        )


@dataclass(slots=True)
class ChainState:
    """All that a checkpoint gives back."""

    small: Small
    watermarks: dict[int, int] = field(default_factory=dict)
    active: dict[int, SavedOrigin] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    heads: dict[str, tuple[dict[str, int], set[str]]] = field(default_factory=dict)
    ids: list[tuple[list[bytes], list[int]]] = field(default_factory=list)
    generations: list[SavedGeneration] = field(default_factory=list)

    def states(self, now: float) -> dict[int, OriginState]:
        """The active origins' states, as seen at `now` (s)."""
        return {origin: OriginState.restored(saved, now) for origin, saved in self.active.items()}


# --- parts, as bytes


def pack_changes(rows: Sequence[OriginRow], writers: Sequence[int], heads: list[dict[str, Any]]) -> bytes:
    """A part with changes; the heads' codes refer to places in `writers`."""
    saved = [row.saved for row in rows if row.saved is not None]
    flags = bytes(
        0 if row.saved is None else _ACTIVE | (_FORGOT if row.saved.forgot else 0) for row in rows
    )  # fmt: skip
    packed: dict[str, Any] = {
        "origins": _bytes(row.origin for row in rows),
        "watermarks": _bytes(row.watermark for row in rows),
        "epochs": _bytes(row.epoch for row in rows),
        "flags": flags,
        "known_above": _bytes(one.known_above for one in saved),
        "clock_counts": _bytes(len(row.clock) for row in rows),
        "clocks": b"".join(_bytes(row.clock) + _bytes(row.clock.values()) for row in rows if row.clock),
        "writers": _bytes(writers),
        "heads": heads,
    }
    for name in ("recent", "runs", "voids"):
        columns = [getattr(one, name) for one in saved]
        packed[f"{name}_counts"] = _bytes(len(one[0]) for one in columns)
        packed[name] = [b"".join(_little(one[at]) for one in columns) for at in range(3)]
    return bytes(msgpack.packb(packed))


def pack_ids(ids: Sequence[bytes], offsets: Sequence[int]) -> list[bytes]:
    """A part with ids and the offset of each."""
    return [b"".join(ids), np.fromiter(offsets, "<u8", len(ids)).tobytes()]


def pack_generation(generation: Generation) -> list[bytes]:
    """A part with a sealed generation: three columns, then the bits of its filter."""
    columns = (generation.hashes, generation.seconds, generation.offsets)
    return [*(column.astype("<u8", copy=False).tobytes() for column in columns), generation.filter.save()]


def unpack(raw: bytes, part: Callable[[str], bytes]) -> ChainState:
    """The state from a checkpoint's section and its parts. Raises ValueError, KeyError, as `part` does."""
    small = Small.unpack(raw)
    state = ChainState(small)
    places = {origin: place for place, origin in enumerate(small.vectors.writers)}
    for name in small.changes:
        told = msgpack.unpackb(part(name))
        _take_origins(state, told)
        mine = [places[origin] for origin in _array(told["writers"])]
        for packed in told["heads"]:
            heads, dead = state.heads.setdefault(packed["name"], ({}, set()))
            keys, codes, died, alive = unpack_heads(packed, mine)
            heads.update(zip(keys, codes, strict=True))
            if dead:
                dead.difference_update(alive)
            dead.update(died)
    sealed_until = -1
    for name, count, filter_ids, last in small.generations:
        state.generations.append(_unpack_generation(part(name), count, filter_ids, last))
        sealed_until = last
    for name, _ in small.ids:
        ids, offsets = _unpack_ids(part(name), sealed_until)
        state.ids.append((ids, offsets))
    return state


def _take_origins(state: ChainState, told: dict[str, Any]) -> None:
    """Take over the origins of one part: the later row counts, but runs go on where they stopped."""
    counts = {name: _array(told[f"{name}_counts"]) for name in ("recent", "runs", "voids")}
    at = dict.fromkeys(counts, 0)
    known_above = iter(_array(told["known_above"]))
    clocks, clock_at, active = _array(told["clocks"]), 0, 0
    for origin, watermark, epoch, flags, clock_count in zip(
        _array(told["origins"]), _array(told["watermarks"]), _array(told["epochs"]), told["flags"],
        _array(told["clock_counts"]), strict=True,
    ):  # fmt: skip
        if watermark:
            state.watermarks[origin] = watermark
        if clock_count:
            middle, end = clock_at + clock_count, clock_at + 2 * clock_count
            state.clocks[origin] = dict(zip(clocks[clock_at:middle], clocks[middle:end], strict=True))
            clock_at = end
        if not flags & _ACTIVE:
            state.active.pop(origin, None)
            state.idle[origin] = epoch
            continue
        columns = {}
        for name, kinds in (("recent", "QQI"), ("runs", "QQQ"), ("voids", "QQI")):
            count = counts[name][active]
            columns[name] = _columns(told[name], kinds, at[name], count)
            at[name] += count
        active += 1
        state.idle.pop(origin, None)
        before = state.active.get(origin)
        runs = columns["runs"] if before is None else _go_on(before.runs, columns["runs"])
        state.active[origin] = SavedOrigin(
            epoch, next(known_above), bool(flags & _FORGOT), columns["recent"], runs, columns["voids"]
        )


def _go_on(before: Columns, more: Columns) -> Columns:
    """Runs with those that follow; the last one that was saved may come again, longer."""
    if more[0]:
        while before[0] and before[0][-1] >= more[0][0]:
            for column in before:
                column.pop()
    for column, added in zip(before, more, strict=True):
        column.extend(added)
    return before


def _columns(raw: list[bytes], kinds: str, first: int, count: int) -> Columns:
    one, two, three = (
        _array(memoryview(column)[first * size : (first + count) * size], kind)
        for column, kind, size in zip(raw, kinds, map(_SIZES.get, kinds), strict=True)
        if size is not None
    )
    return one, two, three


_SIZES = {"Q": 8, "I": 4}


def _unpack_generation(raw: bytes, count: int, filter_ids: int, last: int) -> SavedGeneration:
    size = count * _WORD_BYTES
    columns = [np.frombuffer(raw, "<u8", count, at * size) for at in range(3)]
    return SavedGeneration(
        columns[0], columns[1], columns[2], memoryview(raw)[3 * size :], filter_ids, last
    )  # fmt: skip


def _unpack_ids(raw: bytes, above: int) -> tuple[list[bytes], list[int]]:
    """The ids of a part that stand above an offset: those up to it are in a generation."""
    count = len(raw) // (_ID_BYTES + _WORD_BYTES)
    offsets = np.frombuffer(raw, "<u8", count, count * _ID_BYTES).astype(np.int64)
    first = int(offsets.searchsorted(above, side="right"))
    ids = [raw[at : at + _ID_BYTES] for at in range(first * _ID_BYTES, count * _ID_BYTES, _ID_BYTES)]
    return ids, offsets[first:].tolist()


def _bytes(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()


def _array(raw: bytes | memoryview, kind: str = "Q") -> array[int]:
    return array(kind, np.frombuffer(raw, "<u8" if kind == "Q" else "<u4").astype(kind).tobytes())


def _little(column: array[int]) -> bytes:
    return np.array(column, "<u8" if column.typecode == "Q" else "<u4").tobytes()
