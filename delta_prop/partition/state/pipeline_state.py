"""Serialization of the pipeline's state for a checkpoint. Pure.

One section holds the small part. The parts that grow are in files, each written once: *changes* (the origins
and heads that changed since the last checkpoint, or all), *ids* that were added since, and sorted *runs* of
ids, which are searched in place. Loaded in this order, they give the state.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from delta_prop.partition.ingest.heads import SavedHeads
from delta_prop.partition.ingest.origins import OriginColumns, OriginState, SavedOrigin
from delta_prop.partition.ingest.vector_heads import SavedVectors

if TYPE_CHECKING:
    Columns = tuple[array[int], array[int], array[int]]
    from delta_prop.partition.ingest.id_runs import IdRun

SECTION = "chain"
"""Name of the section in a checkpoint; part of the file format."""
VERSION = 2
_ID_BYTES, _WORD_BYTES = 16, 8


@dataclass(slots=True)
class SavedOrigins:
    """Origins with their watermarks, each as of one moment.

    `active`: 1 for an active origin, 0 for an idle one. `columns`: the states of the active origins.
    `clocks`: for each of these, first the origins of its clock, then their counters; `clock_counts`: the
    number of either.
    """

    origins: array[int] = field(default_factory=partial(array, "Q"))
    watermarks: array[int] = field(default_factory=partial(array, "Q"))
    idle_epochs: array[int] = field(default_factory=partial(array, "Q"))
    active: array[int] = field(default_factory=partial(array, "B"))
    columns: OriginColumns = field(default_factory=OriginColumns)
    clock_counts: array[int] = field(default_factory=partial(array, "Q"))
    clocks: array[int] = field(default_factory=partial(array, "Q"))

    def add(
        self, origin: int, watermark: int, state: OriginState, clock: Mapping[int, int], *, full: bool
    ) -> None:
        """Add an active origin."""
        self.origins.append(origin)
        self.watermarks.append(watermark)
        self.active.append(1)
        state.save(self.columns, full=full)
        self.clock_counts.append(len(clock))
        if clock:
            self.clocks.extend(clock)
            self.clocks.extend(clock.values())

    def add_idle(self, origin: int, watermark: int, epoch: int) -> None:
        """Add an idle origin, or one known only by its watermark (epoch 0)."""
        self.origins.append(origin)
        self.watermarks.append(watermark)
        self.active.append(0)
        self.idle_epochs.append(epoch)


@dataclass(slots=True)
class StateManifest:
    """The small part of the state, and the names of the files with the rest, in the order to read them.

    `kept_since`: offset from which on all ids are known; `forgotten`: number of runs of ids dropped so far.
    """

    lamport: int = 0
    hybrid_time: int = 0
    kept_since: int = 0
    forgotten: int = 0
    vectors: SavedVectors = field(default_factory=lambda: SavedVectors((), {}, complete=True))
    refused: tuple[bytes, bytes] = (b"", b"")
    """Ids of deltas that were refused permanently, and the codes."""
    changes: list[str] = field(default_factory=list)
    ids: list[tuple[str, int]] = field(default_factory=list)  # file, last offset in it
    runs: list[str] = field(default_factory=list)

    def pack(self) -> bytes:
        """Return the section's bytes."""
        fields = {
            "version": VERSION,
            "lamport": self.lamport,
            "hybrid_time": self.hybrid_time,
            "kept_since": self.kept_since,
            "forgotten": self.forgotten,
            "writers": _pack_u64(self.vectors.writers),
            "namespaces": self.vectors.namespaces,
            "complete": self.vectors.complete,
            "refused": self.refused,
            "changes": self.changes,
            "ids": self.ids,
            "runs": self.runs,
        }
        return bytes(msgpack.packb(fields))

    @classmethod
    def unpack(cls, raw: bytes) -> StateManifest:
        """Parse a section. Raises ValueError if it has another version."""
        fields = msgpack.unpackb(raw)
        if fields["version"] != VERSION:
            raise ValueError(
                f"the pipeline's state has version {fields['version']}: read it with a program of that "
                f"version, not of {VERSION}"
            )
        return cls(
            fields["lamport"],
            fields["hybrid_time"],
            fields["kept_since"],
            fields["forgotten"],
            SavedVectors(
                tuple(_unpack_array(fields["writers"])),
                {name: (dimension, complete) for name, (dimension, complete) in fields["namespaces"].items()},
                fields["complete"],
            ),
            (fields["refused"][0], fields["refused"][1]),
            fields["changes"],
            [(name, last) for name, last in fields["ids"]],
            fields["runs"],
        )


@dataclass(slots=True)
class PipelineState:
    """Everything that a checkpoint restores.

    By origin: `watermarks`, `active` (states), `idle` (epochs) and `clocks`. `heads`: oldest first. `ids`:
    those in no run, with their offsets.
    """

    manifest: StateManifest
    watermarks: dict[int, int] = field(default_factory=dict)
    active: dict[int, SavedOrigin] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    heads: list[SavedHeads] = field(default_factory=list)
    ids: list[tuple[list[bytes], list[int]]] = field(default_factory=list)
    runs: list[IdRun] = field(default_factory=list)

    def restore_states(self, now: float) -> dict[int, OriginState]:
        """Return the active origins' states, last seen at `now` (s)."""
        return {origin: OriginState.from_saved(saved, now) for origin, saved in self.active.items()}


# --- files, as bytes


def pack_changes(saved: SavedOrigins, writers: Sequence[int], heads: list[dict[str, Any]]) -> bytes:
    """Return a file of changes; the heads' codes are indexes into `writers`."""
    columns = saved.columns
    packed: dict[str, Any] = {"writers": _pack_u64(writers), "heads": heads}
    for name in ("origins", "watermarks", "idle_epochs", "active", "clock_counts", "clocks"):
        packed[name] = _to_little_endian(getattr(saved, name))
    for name in ("epochs", "known_above", "forgot", "recent_counts", "runs_counts", "voids_counts"):
        packed[name] = _to_little_endian(getattr(columns, name))
    for name in ("recent", "runs", "voids"):
        packed[name] = [_to_little_endian(column) for column in getattr(columns, name)]
    return bytes(msgpack.packb(packed))


def pack_ids(ids: Sequence[bytes], offsets: Sequence[int]) -> list[bytes]:
    """Return a file of ids with their offsets, in chunks."""
    return [b"".join(ids), np.fromiter(offsets, "<u8", len(ids)).tobytes()]


def unpack(raw: bytes, read_part: Callable[[str], bytes], open_run: Callable[[str], IdRun]) -> PipelineState:
    """Return the state from a checkpoint's section and its files; `open_run` opens the runs of ids.

    Raises ValueError, KeyError, and what `read_part` and `open_run` raise.
    """
    manifest = StateManifest.unpack(raw)
    state = PipelineState(manifest)
    index_of = {origin: index for index, origin in enumerate(manifest.vectors.writers)}
    for name in manifest.changes:
        fields = msgpack.unpackb(read_part(name))
        _load_origins(state, fields)
        codes_of_file = [index_of[origin] for origin in _unpack_array(fields["writers"])]
        state.heads += [SavedHeads.read(packed, codes_of_file) for packed in fields["heads"]]
    state.runs = [open_run(name) for name in manifest.runs]
    sealed_until = state.runs[-1].facts.last_offset if state.runs else -1
    for name, _ in manifest.ids:
        ids, offsets = _unpack_ids(read_part(name), sealed_until)
        state.ids.append((ids, offsets))
    return state


def _load_origins(state: PipelineState, packed: dict[str, Any]) -> None:
    """Merge the origins of one file into the state: later rows replace earlier ones, ranges are extended."""
    counts = {name: _unpack_array(packed[f"{name}_counts"]) for name in ("recent", "runs", "voids")}
    positions = dict.fromkeys(counts, 0)
    known_above, epochs = iter(_unpack_array(packed["known_above"])), iter(_unpack_array(packed["epochs"]))
    idle_epochs, forgot = iter(_unpack_array(packed["idle_epochs"])), iter(packed["forgot"])
    clocks, clock_counts, clock_position, active_row = (
        _unpack_array(packed["clocks"]),
        _unpack_array(packed["clock_counts"]),
        0,
        0,
    )
    for origin, watermark, active in zip(
        _unpack_array(packed["origins"]), _unpack_array(packed["watermarks"]), packed["active"], strict=True
    ):
        if watermark:
            state.watermarks[origin] = watermark
        if not active:
            state.active.pop(origin, None)
            state.idle[origin] = next(idle_epochs)
            continue
        columns = {}
        for name, kinds in (("recent", "QQI"), ("runs", "QQQ"), ("voids", "QQI")):
            columns[name] = _read_columns(packed[name], kinds, positions[name], counts[name][active_row])
            positions[name] += counts[name][active_row]
        if clock_count := clock_counts[active_row]:
            clock_middle, end = clock_position + clock_count, clock_position + 2 * clock_count
            state.clocks[origin] = dict(
                zip(clocks[clock_position:clock_middle], clocks[clock_middle:end], strict=True)
            )
            clock_position = end
        active_row += 1
        state.idle.pop(origin, None)
        before = state.active.get(origin)
        runs = columns["runs"] if before is None else _extend_ranges(before.ranges, columns["runs"])
        state.active[origin] = SavedOrigin(
            next(epochs), next(known_above), bool(next(forgot)), columns["recent"], runs, columns["voids"]
        )


def _extend_ranges(saved: Columns, newer: Columns) -> Columns:
    """Extend saved ranges with later ones; the last saved range may recur, longer."""
    if newer[0]:
        while saved[0] and saved[0][-1] >= newer[0][0]:
            for column in saved:
                column.pop()
    for column, added in zip(saved, newer, strict=True):
        column.extend(added)
    return saved


def _read_columns(raw: list[bytes], kinds: str, start: int, count: int) -> Columns:
    first_column, second_column, third_column = (
        _unpack_array(memoryview(column)[start * size : (start + count) * size], kind)
        for column, kind, size in zip(raw, kinds, map(_SIZES.get, kinds), strict=True)
        if size is not None
    )
    return first_column, second_column, third_column


_SIZES = {"Q": 8, "I": 4}


def _unpack_ids(raw: bytes, sealed_until: int) -> tuple[list[bytes], list[int]]:
    """Return the ids of a file after offset `sealed_until`; those up to it are in a run."""
    count = len(raw) // (_ID_BYTES + _WORD_BYTES)
    offsets = np.frombuffer(raw, "<u8", count, count * _ID_BYTES).astype(np.int64)
    start = int(offsets.searchsorted(sealed_until, side="right"))
    ids = [
        raw[position : position + _ID_BYTES]
        for position in range(start * _ID_BYTES, count * _ID_BYTES, _ID_BYTES)
    ]
    return ids, offsets[start:].tolist()


def _pack_u64(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<u8").tobytes()


def _unpack_array(raw: bytes | memoryview, kind: str = "Q") -> array[int]:
    column = array(kind)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _to_little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
