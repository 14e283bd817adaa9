"""The chain's state as bytes, for a checkpoint, and back. Pure.

Small things stand in one section. What grows lies in parts that are written once: *changes* (origins and
heads that moved since the checkpoint before, or all of them), *ids* that were added since, sorted *runs* of
ids, which stay where they are and are looked into. Read in their order they give the state.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from delta_prop.ingest.heads import unpack_heads
from delta_prop.ingest.origins import OriginColumns, OriginState, SavedOrigin
from delta_prop.ingest.vectors import SavedVectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Columns = tuple[array[int], array[int], array[int]]

    from delta_prop.ingest.id_runs import IdRun

SECTION = "chain"
VERSION = 2
_ID_BYTES, _WORD_BYTES = 16, 8


@dataclass(slots=True)
class SavedOrigins:
    """Origins with their watermarks, each as it was at one moment; `columns` has those that are active."""

    origins: array[int] = field(default_factory=partial(array, "Q"))
    watermarks: array[int] = field(default_factory=partial(array, "Q"))
    idle_epochs: array[int] = field(default_factory=partial(array, "Q"))
    active: array[int] = field(default_factory=partial(array, "B"))
    columns: OriginColumns = field(default_factory=OriginColumns)
    clock_counts: array[int] = field(default_factory=partial(array, "Q"))
    clocks: array[int] = field(default_factory=partial(array, "Q"))

    def add(
        self, origin: int, watermark: int, state: OriginState, clock: Mapping[int, int], *, whole: bool
    ) -> None:
        """An active origin."""
        self.origins.append(origin)
        self.watermarks.append(watermark)
        self.active.append(1)
        state.save(self.columns, whole=whole)
        self.clock_counts.append(len(clock))
        if clock:
            self.clocks.extend(clock)
            self.clocks.extend(clock.values())

    def add_idle(self, origin: int, watermark: int, epoch: int) -> None:
        """An origin that was put aside, or is known by its watermark alone (epoch 0)."""
        self.origins.append(origin)
        self.watermarks.append(watermark)
        self.active.append(0)
        self.idle_epochs.append(epoch)


@dataclass(slots=True)
class Small:
    """What is small, and which parts hold the rest, in the order to read them."""

    lamport: int = 0
    hybrid_time: int = 0
    kept_since: int = 0
    forgotten: int = 0
    vectors: SavedVectors = field(default_factory=lambda: SavedVectors((), {}, complete=True))
    refused: tuple[bytes, bytes] = (b"", b"")
    """Ids of deltas that were refused for good, and the codes."""
    changes: list[str] = field(default_factory=list)
    ids: list[tuple[str, int]] = field(default_factory=list)  # part, last offset in it
    runs: list[str] = field(default_factory=list)

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
            "refused": self.refused,
            "changes": self.changes,
            "ids": self.ids,
            "runs": self.runs,
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
            (told["refused"][0], told["refused"][1]),
            told["changes"],
            [(name, last) for name, last in told["ids"]],
            told["runs"],
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
    runs: list[IdRun] = field(default_factory=list)

    def states(self, now: float) -> dict[int, OriginState]:
        """The active origins' states, as seen at `now` (s)."""
        return {origin: OriginState.restored(saved, now) for origin, saved in self.active.items()}


# --- parts, as bytes


def pack_changes(saved: SavedOrigins, writers: Sequence[int], heads: list[dict[str, Any]]) -> bytes:
    """A part with changes; the heads' codes refer to places in `writers`."""
    columns = saved.columns
    packed: dict[str, Any] = {"writers": _bytes(writers), "heads": heads}
    for name in ("origins", "watermarks", "idle_epochs", "active", "clock_counts", "clocks"):
        packed[name] = _little(getattr(saved, name))
    for name in ("epochs", "known_above", "forgot", "recent_counts", "runs_counts", "voids_counts"):
        packed[name] = _little(getattr(columns, name))
    for name in ("recent", "runs", "voids"):
        packed[name] = [_little(column) for column in getattr(columns, name)]
    return bytes(msgpack.packb(packed))


def pack_ids(ids: Sequence[bytes], offsets: Sequence[int]) -> list[bytes]:
    """A part with ids and the offset of each."""
    return [b"".join(ids), np.fromiter(offsets, "<u8", len(ids)).tobytes()]


def unpack(raw: bytes, part: Callable[[str], bytes], run: Callable[[str], IdRun]) -> ChainState:
    """The state from a checkpoint's section and its parts, of which `run` opens those that are runs of ids.

    Raises ValueError, KeyError, as these two do.
    """
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
    state.runs = [run(name) for name in small.runs]
    sealed_until = state.runs[-1].facts.last_offset if state.runs else -1
    for name, _ in small.ids:
        ids, offsets = _unpack_ids(part(name), sealed_until)
        state.ids.append((ids, offsets))
    return state


def _take_origins(state: ChainState, told: dict[str, Any]) -> None:
    """Take over the origins of one part: the later row counts, but runs go on where they stopped."""
    counts = {name: _array(told[f"{name}_counts"]) for name in ("recent", "runs", "voids")}
    at = dict.fromkeys(counts, 0)
    known_above, epochs = iter(_array(told["known_above"])), iter(_array(told["epochs"]))
    idle_epochs, forgot = iter(_array(told["idle_epochs"])), iter(told["forgot"])
    clocks, clock_counts, clock_at, row = _array(told["clocks"]), _array(told["clock_counts"]), 0, 0
    for origin, watermark, active in zip(
        _array(told["origins"]), _array(told["watermarks"]), told["active"], strict=True
    ):
        if watermark:
            state.watermarks[origin] = watermark
        if not active:
            state.active.pop(origin, None)
            state.idle[origin] = next(idle_epochs)
            continue
        columns = {}
        for name, kinds in (("recent", "QQI"), ("runs", "QQQ"), ("voids", "QQI")):
            columns[name] = _columns(told[name], kinds, at[name], counts[name][row])
            at[name] += counts[name][row]
        if clock_counts[row]:
            middle, end = clock_at + clock_counts[row], clock_at + 2 * clock_counts[row]
            state.clocks[origin] = dict(zip(clocks[clock_at:middle], clocks[middle:end], strict=True))
            clock_at = end
        row += 1
        state.idle.pop(origin, None)
        before = state.active.get(origin)
        runs = columns["runs"] if before is None else _go_on(before.runs, columns["runs"])
        state.active[origin] = SavedOrigin(
            next(epochs), next(known_above), bool(next(forgot)), columns["recent"], runs, columns["voids"]
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


def _unpack_ids(raw: bytes, above: int) -> tuple[list[bytes], list[int]]:
    """The ids of a part that stand above an offset: those up to it are in a run."""
    count = len(raw) // (_ID_BYTES + _WORD_BYTES)
    offsets = np.frombuffer(raw, "<u8", count, count * _ID_BYTES).astype(np.int64)
    first = int(offsets.searchsorted(above, side="right"))
    ids = [raw[at : at + _ID_BYTES] for at in range(first * _ID_BYTES, count * _ID_BYTES, _ID_BYTES)]
    return ids, offsets[first:].tolist()


def _bytes(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()


def _array(raw: bytes | memoryview, kind: str = "Q") -> array[int]:
    column = array(kind)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
