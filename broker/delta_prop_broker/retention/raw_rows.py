"""Rows of frames as byte ranges, which compaction copies from frame to frame without decoding them.

A code names a row: the index of its frame in a list of `RawRows`, shifted by `ROW_BITS`, plus its row number
in that frame. With the flag `AS_CREATE`, the row counts as a create of its vector, whatever its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from delta_prop_broker.retention.snapshot import FRAME_BYTES_MAX, FRAME_ROWS_MAX, sort_keys
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Kind
from delta_prop_wire.encode import name_columns
from delta_prop_wire.layout import Column
from delta_prop_wire.lazy import lazy
from delta_prop_wire.state_rows import assemble_states

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW_BITS = 16
ROW_MASK = (1 << ROW_BITS) - 1
AS_CREATE = 1 << 56
LAMPORT, ORIGIN, COUNTER, OFFSET, IGNORED = range(5)
"""Columns of `RawRows.dots`."""

# Tables from the kind of a row to the kind that is written.
_AS_STATE = bytes(Kind.CREATE if kind == Kind.DENSE else kind for kind in range(256))
_UNCHANGED = bytes(range(256))
_DOT_COLUMNS = (
    Column.STATE_LAMPORTS,
    Column.STATE_ORIGINS,
    Column.STATE_COUNTERS,
    Column.ROW_OFFSETS,
    Column.STATE_IGNORED,
)
_NUMBER_BYTES = 4
_VECTOR_KINDS = 1 << Kind.CREATE | 1 << Kind.DENSE


class RawRows:
    """One frame, whose rows are split into numbers, bytes and metadata."""

    def __init__(self, logged: LoggedBatch) -> None:
        self.logged = logged
        self.batch = logged.batch
        self.keys = sort_keys(logged.batch)
        self.kinds = logged.batch.kinds

    @lazy
    def dots(self) -> NDArray[np.uint64]:
        """One line per row: Lamport number, origin, counter, offset, number of ignored deltas."""
        logged, batch = self.logged, self.batch
        dots = np.zeros((batch.count, len(_DOT_COLUMNS)), np.uint64)
        if batch.is_state:
            for number, column in enumerate(_DOT_COLUMNS):
                raw = batch.column(column)
                if raw is not None:
                    dots[:, number] = np.frombuffer(raw, "<u8")
            return dots
        rows = np.arange(batch.count, dtype=np.uint64)
        dots[:, LAMPORT] = rows + np.uint64(logged.lamport)
        dots[:, ORIGIN] = batch.origin
        counters = batch.counters
        dots[:, COUNTER] = rows + np.uint64(batch.base) if counters is None else counters
        dots[:, OFFSET] = rows + np.uint64(logged.offset)
        return dots

    @lazy
    def parts(self) -> list[tuple[memoryview, list[int]] | None]:
        """(column, bounds of its rows), for numbers, bytes and metadata; None for a missing column."""
        batch = self.batch
        numbers = batch.column(Column.VALUES)
        parts: list[tuple[memoryview, list[int]] | None] = [
            None if numbers is None else (numbers, (batch.value_bounds * _NUMBER_BYTES).tolist())
        ]
        for ends, content in ((Column.BLOB_ENDS, Column.BLOBS), (Column.METADATA_ENDS, Column.METADATA)):
            raw, stops = batch.column(content), batch.column(ends)
            if raw is None or stops is None:
                parts.append(None)
            else:
                parts.append((raw, [0, *np.frombuffer(stops, "<u4").tolist()]))
        return parts

    @lazy
    def width(self) -> int:
        """The dimension, if each row is only a vector and all have that dimension; else 0."""
        batch = self.batch
        only_vectors = not batch.kinds_mask & ~_VECTOR_KINDS and batch.column(Column.METADATA) is None
        return (batch.values_per_row or 0) if only_vectors else 0

    def has_metadata(self, row: int) -> bool:
        """Return True if a row has metadata."""
        part = self.parts[2]
        return part is not None and part[1][row] < part[1][row + 1]

    def size(self, row: int) -> int:
        """Return the bytes of a row's numbers, bytes and metadata."""
        size = 0
        for part in self.parts:
            if part is not None:
                size += part[1][row + 1] - part[1][row]
        return size


class RowView:
    """A view of several frames, from which any rows can be taken at once.

    `spans`: (first, end) of the rows of each frame that may be taken; None: all rows. If all rows are only
    vectors of one dimension, `matrix` holds them, and `kinds` their kinds; else `matrix` is None, and `kinds`
    is not set.
    """

    def __init__(self, frames: Sequence[RawRows], spans: Sequence[tuple[int, int]] | None = None) -> None:
        self.frames = frames
        spans = [(0, len(frame.keys)) for frame in frames] if spans is None else spans
        frame_spans = list(zip(frames, spans, strict=True))
        counts = np.array([end - first for first, end in spans], np.int64)
        self._starts = np.cumsum(counts) - counts - np.array([first for first, _ in spans], np.int64)
        self._dots: NDArray[np.uint64] = np.concatenate([frame.dots[a:b] for frame, (a, b) in frame_spans])
        self.matrix: NDArray[np.float32] | None = None
        width = frames[0].width
        if width and all(frame.width == width for frame in frames):
            rows = [frame.batch.values[a * width : b * width] for frame, (a, b) in frame_spans]
            self.matrix = np.concatenate(rows).reshape(-1, width)
            self.kinds = np.frombuffer(b"".join(frame.kinds[a:b] for frame, (a, b) in frame_spans), np.uint8)

    def row_numbers(self, codes: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers of the rows that `codes` name, counted over the spans of all frames."""
        locations = np.array(codes, np.int64) & (AS_CREATE - 1)
        numbers: NDArray[np.int64] = self._starts[locations >> ROW_BITS] + (locations & ROW_MASK)
        return numbers

    def dots(self, row_numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the lines of `RawRows.dots` for these rows."""
        dots: NDArray[np.uint64] = self._dots.take(row_numbers, axis=0)
        return dots


class FrameSink(Protocol):
    """A list of frames, or a file that takes frames like a list."""

    def append(self, batch: Batch, /) -> object:
        """Add the next frame. A file raises OSError."""


class FrameBuilder:
    """Collects rows into frames, in the order in which they are added, and appends each frame to `frames`.

    `states`: the rows are whole states, so a dense row becomes a create. A frame has up to `bytes_max`,
    unless it holds a single row. `rows`: number of rows in appended frames; `alive`: of these, rows that are
    not deletes.
    """

    def __init__(self, frames: FrameSink, *, states: bool, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.rows = self.alive = 0
        self._bytes_max = bytes_max
        self._frames = frames
        self._table = _AS_STATE if states else _UNCHANGED
        self._kind_table = np.frombuffer(self._table, np.uint8)
        self._clear()

    def _clear(self) -> None:
        self._keys: list[str] = []
        self._kinds = bytearray()
        self._dots: list[NDArray[np.uint64]] = []
        self._parts: list[list[Any]] = [[], [], []]
        self._sizes: list[list[int]] = [[], [], []]
        self._bytes = 0

    def add(
        self,
        view: RowView,
        keys: list[str],
        codes: list[int],
        ignored_counts: Mapping[str, int] | None = None,
    ) -> None:
        """Add the rows that `codes` name, with their keys; `ignored_counts`: more ignored deltas, per key."""
        row_numbers = view.row_numbers(codes)
        dots = view.dots(row_numbers)
        for index, key in enumerate(keys) if ignored_counts else ():
            if ignored_counts is not None and key in ignored_counts:
                dots[index, IGNORED] += np.uint64(ignored_counts[key])
        if view.matrix is not None:
            self._add_vectors(view, keys, np.array(codes, np.int64), dots)
        else:
            self._add_rows(view.frames, keys, codes, dots)

    def _add_vectors(
        self, view: RowView, keys: list[str], codes: NDArray[np.int64], dots: NDArray[np.uint64]
    ) -> None:
        """Add rows that are only vectors of one dimension, many at once."""
        matrix, row_numbers = view.matrix, view.row_numbers(codes.tolist())
        assert matrix is not None
        width = matrix.shape[1] * _NUMBER_BYTES
        kinds = self._kind_table[view.kinds[row_numbers]]
        kinds[codes >= AS_CREATE] = Kind.CREATE
        start = 0
        while start < len(keys):
            capacity = min(FRAME_ROWS_MAX - len(self._keys), max((self._bytes_max - self._bytes) // width, 1))
            end = min(start + capacity, len(keys))
            self._sizes[0] += [0] * (len(self._keys) - len(self._sizes[0]))  # for rows without numbers
            self._keys += keys[start:end]
            self._kinds += kinds[start:end].tobytes()
            self._dots.append(dots[start:end])
            self._parts[0].append(matrix.take(row_numbers[start:end], axis=0).tobytes())
            self._sizes[0] += [width] * (end - start)
            self._bytes += width * (end - start)
            start = end
            if len(self._keys) >= FRAME_ROWS_MAX or self._bytes + width > self._bytes_max:
                self.flush()

    def _add_rows(
        self, frames: Sequence[RawRows], keys: list[str], codes: list[int], dots: NDArray[np.uint64]
    ) -> None:
        """Add rows of any kind, one by one."""
        for index, code in enumerate(codes):
            frame, row = frames[(code & (AS_CREATE - 1)) >> ROW_BITS], code & ROW_MASK
            size = frame.size(row)
            if self._keys and (self._bytes + size > self._bytes_max or len(self._keys) >= FRAME_ROWS_MAX):
                self.flush()
            self._keys.append(keys[index])
            self._kinds.append(Kind.CREATE if code & AS_CREATE else self._table[frame.kinds[row]])
            self._dots.append(dots[index : index + 1])
            self._bytes += size
            for number, part in enumerate(frame.parts):
                if part is not None and (start := part[1][row]) < (end := part[1][row + 1]):
                    sizes = self._sizes[number]
                    if len(sizes) + 1 < len(self._keys):  # the rows before it have no such part
                        sizes += [0] * (len(self._keys) - 1 - len(sizes))
                    self._parts[number].append(part[0][start:end])
                    sizes.append(end - start)

    def flush(self) -> None:
        """Append the collected rows as a frame, if there are any."""
        if not self._keys:
            return
        count, kinds = len(self._keys), bytes(self._kinds)
        columns = name_columns(*_split_keys(self._keys))
        mask = sum(1 << kind for kind in set(kinds))
        if mask & (mask - 1):
            columns[Column.KINDS] = kinds
        dimension = self._add_parts(columns, kinds)
        dots = np.concatenate(self._dots)
        for number, column in enumerate(_DOT_COLUMNS):
            if number != IGNORED or dots[:, number].any():
                columns[column] = dots[:, number].astype("<u8").tobytes()
        self.rows += count
        self.alive += count - kinds.count(Kind.DELETE)
        batch = assemble_states(columns, count, mask, dimension)
        self._clear()
        self._frames.append(batch)

    def _add_parts(self, columns: dict[Column, bytes], kinds: bytes) -> int:
        """Add the parts of the rows; return the common dimension of their vectors, else 0."""
        for sizes in self._sizes:
            sizes.extend([0] * (len(self._keys) - len(sizes)))
        numbers, blobs, metadata = (np.array(sizes, np.int64) for sizes in self._sizes)
        contents = [b"".join(parts) for parts in self._parts]
        if contents[0]:
            columns[Column.VALUES] = contents[0]
        if (numbers != numbers[0]).any():
            columns[Column.VALUE_ENDS] = _pack_ends(numbers // _NUMBER_BYTES)
        if contents[1]:
            columns[Column.BLOBS], columns[Column.BLOB_ENDS] = contents[1], _pack_ends(blobs)
        if contents[2]:
            columns[Column.METADATA], columns[Column.METADATA_ENDS] = contents[2], _pack_ends(metadata)
        kind_column = np.frombuffer(kinds, np.uint8)
        widths = numbers[(kind_column == Kind.CREATE) | (kind_column == Kind.DENSE)]
        is_uniform = len(widths) > 0 and (widths == widths[0]).all()
        return int(widths[0]) // _NUMBER_BYTES if is_uniform else 0


def _pack_ends(sizes: NDArray[np.int64]) -> bytes:
    return np.cumsum(sizes).astype("<u4").tobytes()


def _split_keys(keys: list[str]) -> tuple[list[str], list[str]]:
    """Return the namespaces and vector ids of sorted keys."""
    namespace = keys[0].partition("\0")[0]
    if keys[-1].startswith(namespace + "\0"):
        return [namespace] * len(keys), [key[len(namespace) + 1 :] for key in keys]
    pairs = [key.partition("\0") for key in keys]
    return [pair[0] for pair in pairs], [pair[2] for pair in pairs]
