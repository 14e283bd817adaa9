"""The file of an index's graphs: each graph, the ids of its live nodes, and their rows as indexed.

A graph of another log or offset is harmless, because the rows are compared: a vector counts as indexed only
if it is still near its saved row. Numbers are little-endian. The file has a checksum and is replaced
atomically, so a read returns the content last written, or fails.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.hnsw import Graph, GraphError, Space, row_type
from delta_prop_sinks.hnsw_rows import Generation, HnswRows
from delta_prop_sinks.storage_image import sync_folder
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import Cursor

MAGIC = b"dpgraph1"
_HEAD = struct.Struct("<8sQI")
_CHUNK_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_ROWS_PER_STEP = 4096


@dataclass(frozen=True, slots=True, eq=False)
class GraphPart:
    """One generation of one namespace, at the time of creation; `encode` may run on any thread.

    `nodes`: the numbers of the live nodes; `slots`: the slot of each; `rows`: the indexed rows of all slots.
    Rows and ids are read later. Rows do not change, because none is indexed during a save. Ids change only if
    slots are released; then a start compares the row with that of another vector, or of none.
    """

    hnsw_rows: HnswRows
    generation: Generation
    nodes: NDArray[np.int32]
    slots: NDArray[np.intp]
    rows: NDArray[Any]

    @classmethod
    def all_of(cls, hnsw_rows: HnswRows) -> list[GraphPart]:
        """Return the parts of one namespace."""
        return [
            cls(
                hnsw_rows,
                generation,
                nodes,
                generation.slots[nodes].astype(np.intp),
                hnsw_rows.indexed_matrix,
            )
            for generation in (hnsw_rows.base, hnsw_rows.young)
            if generation is not None and generation.live_count and not generation.must_be_replaced
            for nodes in [generation.find_live_nodes().astype(np.int32)]
        ]

    def encode(self) -> tuple[dict[str, object], list[bytes | memoryview]]:
        """Return the part's entry in the header, and its sections."""
        table = self.hnsw_rows.table
        # A slot may be released meanwhile: a node without an id, or with a wrong one, is harmless.
        ids = [(table.slots.id(slot) or "").encode() for slot in self.slots.tolist()]
        sections: list[bytes | memoryview] = [
            self.generation.graph.dump(),
            self.nodes.astype("<i4").tobytes(),
            np.array([len(id_) for id_ in ids], "<u4").tobytes(),
            b"".join(ids),
            self.rows[self.slots].tobytes(),
        ]
        entry = {
            "namespace": table.namespace,
            "dimension": self.hnsw_rows.dimension,
            "all_nodes": self.generation.node_count,
            "drift_max": self.hnsw_rows.drift_max,
            "sections": [len(section) for section in sections],
        }
        return entry, sections


def pack(parts: Iterable[GraphPart], space: Space, cursor: Cursor) -> list[bytes | memoryview]:
    """Return the content of the file, in sections. Copies all graphs in memory."""
    entries: list[dict[str, object]] = []
    sections: list[bytes | memoryview] = []
    for part in parts:
        entry, part_sections = part.encode()
        entries.append(entry)
        sections += part_sections
    header = json.dumps(
        {
            "space": space,
            "log_id": cursor.log_id.hex(),
            "epoch": cursor.epoch,
            "next_offset": cursor.next_offset,
            "parts": entries,
        }
    ).encode()
    return [_LENGTH.pack(len(header)), header, *sections]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPart:
    """One generation read from the file. `nodes`, `ids`, `rows`: of the live nodes."""

    namespace: str
    dimension: int
    drift_max: float
    generation: Generation
    nodes: NDArray[np.intp]
    ids: list[str]
    rows: NDArray[Any]

    def adopt_into(self, hnsw_rows: HnswRows) -> Iterator[None]:
        """Restore the nodes of vectors that are still near their saved rows, a few thousand per step."""
        hnsw_rows.drift_max = self.drift_max
        hnsw_rows.adopt(self.generation)
        for start in range(0, len(self.ids), _ROWS_PER_STEP):
            step = slice(start, start + _ROWS_PER_STEP)
            slots = hnsw_rows.table.find_slots(self.ids[step])
            is_known = slots >= 0
            hnsw_rows.adopt_rows(
                self.generation, slots[is_known], self.nodes[step][is_known], self.rows[step][is_known]
            )
            yield


def unpack(content: memoryview, space: Space, expansion_add: int) -> tuple[int, list[LoadedPart]]:
    """Return the offset below which all deltas were applied, and the parts. Raises GraphError."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        header = json.loads(bytes(content[_LENGTH.size : _LENGTH.size + length]))
        if header["space"] != space:
            raise GraphError(f"its graphs are of space {header['space']}, the index's of space {space}")
        position, parts = _LENGTH.size + length, []
        for entry in header["parts"]:
            sections = []
            for size in entry["sections"]:
                sections.append(content[position : position + size])
                position += size
            parts.append(_load(entry, sections, space, expansion_add))
        return int(header["next_offset"]), parts
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise GraphError(f"its content is inconsistent: {error!r}") from error


def _load(
    entry: dict[str, Any], sections: Sequence[memoryview], space: Space, expansion_add: int
) -> LoadedPart:
    dump, nodes, lengths, ids, rows = sections
    dimension, count = int(entry["dimension"]), int(entry["all_nodes"])
    graph = Graph(space, dimension, expansion_add)
    graph.load(bytes(dump))
    if len(graph) > count:
        raise GraphError(f"its graph has {len(graph)} nodes instead of {count}")
    generation = Generation(graph)
    generation.allot(count)
    ends = np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64).tolist()
    text = bytes(ids)
    return LoadedPart(
        namespace=entry["namespace"],
        dimension=dimension,
        drift_max=float(entry["drift_max"]),
        generation=generation,
        nodes=np.frombuffer(nodes, "<i4").astype(np.intp),
        ids=[text[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)],
        rows=np.frombuffer(rows, row_type(space)).reshape(len(ends), dimension),
    )


class GraphFileError(Exception):
    """The file could not be read or written; the message names the reason."""


class GraphFile:
    """The file of one index."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> memoryview | None:
        """Return the content last written, None if there is no file. Raises GraphFileError."""
        try:
            data = memoryview(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise GraphFileError(f"{self.path} cannot be read ({error})") from error
        if len(data) < _HEAD.size or bytes(data[: len(MAGIC)]) != MAGIC:
            raise GraphFileError(f"{self.path} is not a graph file of this version")
        _, size, checksum = _HEAD.unpack_from(data)
        content = data[_HEAD.size :]
        if len(content) != size:
            raise GraphFileError(
                f"{self.path} is torn: its header says {size} bytes and it has {len(content)}"
            )
        if _checksum([content]) != checksum:
            raise GraphFileError(f"{self.path} is corrupted: its checksum does not match")
        return content

    def remove(self) -> None:
        """Remove the file, and what an interrupted write has left, durably. Raises OSError."""
        for path in (self.path, self._new_path):
            path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    @property
    def _new_path(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Replace the file. Raises GraphFileError; the old file then still exists."""
        new = self._new_path
        try:
            with open(new, "wb") as file:
                file.write(_HEAD.pack(MAGIC, sum(len(part) for part in parts), _checksum(parts)))
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise GraphFileError(f"{self.path} cannot be written ({error})") from error


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):  # other threads run between chunks
            checksum = crc32c(part[start : start + _CHUNK_BYTES], checksum)
    return checksum
