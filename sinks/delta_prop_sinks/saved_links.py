"""Graphs as bytes and back: each graph, which vectors its live nodes stand for, and the rows linked.

The rows are what makes a loaded graph trustworthy: a vector is linked again only if it still lies where its
row lay, whatever log and offset it comes from. Numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop_sinks.hnsw import Graph, GraphFailed, row_type
from delta_prop_sinks.links import Generation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.hnsw import Space
    from delta_prop_sinks.links import Links
    from delta_prop_wire.cursor import Cursor

_LENGTH = struct.Struct("<I")
_ROWS_A_STEP = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One generation of one namespace, as it is at this moment; `encode` may run on any thread.

    Rows and ids are read later: while saving nothing is linked, so rows stay; ids of live slots never change.
    """

    links: Links
    generation: Generation
    nodes: NDArray[np.int32]
    slots: NDArray[np.intp]
    rows: NDArray[Any]

    @classmethod
    def all_of(cls, links: Links) -> list[Part]:
        """The parts of one namespace."""
        return [cls._of(links, one) for one in (links.base, links.young) if one is not None and one.live]

    @classmethod
    def _of(cls, links: Links, generation: Generation) -> Part:
        slots = generation.slots[: generation.nodes]
        nodes = (slots >= 0).nonzero()[0].astype(np.int32)
        return cls(links, generation, nodes, slots[nodes].astype(np.intp), links.linked_matrix)

    def encode(self) -> tuple[dict[str, object], list[bytes | memoryview]]:
        """What the header says of it, and its sections."""
        table = self.links.table
        ids = [str(table.ids[slot]).encode() for slot in self.slots.tolist()]
        sections: list[bytes | memoryview] = [
            self.generation.graph.dump(),
            self.nodes.astype("<i4").tobytes(),
            np.array([len(one) for one in ids], "<u4").tobytes(),
            b"".join(ids),
            self.rows[self.slots].tobytes(),
        ]
        head = {
            "namespace": table.namespace,
            "dimension": self.links.dimension,
            "all_nodes": self.generation.nodes,
            "drift_max": self.links.drift_max,
            "sections": [len(section) for section in sections],
        }
        return head, sections


def pack(parts: Iterable[Part], space: Space, cursor: Cursor) -> list[bytes | memoryview]:
    """The content of the file, in pieces. Needs the memory of all graphs once more."""
    heads: list[dict[str, object]] = []
    sections: list[bytes | memoryview] = []
    for part in parts:
        head, some = part.encode()
        heads.append(head)
        sections += some
    header = json.dumps(
        {
            "space": space,
            "log_id": cursor.log_id.hex(),
            "epoch": cursor.epoch,
            "next_offset": cursor.next_offset,
            "parts": heads,
        }
    ).encode()
    return [_LENGTH.pack(len(header)), header, *sections]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """One generation out of the file."""

    namespace: str
    dimension: int
    drift_max: float
    generation: Generation
    nodes: NDArray[np.intp]
    ids: list[str]
    rows: NDArray[Any]

    def adopt_into(self, links: Links) -> Iterator[None]:
        """Link the vectors that are still there and where they were, a few thousand at each step."""
        links.drift_max = self.drift_max
        links.adopt(self.generation)
        for at in range(0, len(self.ids), _ROWS_A_STEP):
            step = slice(at, at + _ROWS_A_STEP)
            slots = links.table.known(self.ids[step])
            there = slots >= 0
            links.adopt_rows(self.generation, slots[there], self.nodes[step][there], self.rows[step][there])
            yield


def unpack(content: memoryview, space: Space, expansion_add: int) -> tuple[int, list[Loaded]]:
    """The offset below which all was applied, and the parts. GraphFailed where it is another index's."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        header = json.loads(bytes(content[_LENGTH.size : _LENGTH.size + length]))
        if header["space"] != space:
            raise GraphFailed(f"its graphs are of the space {header['space']}, the index's of {space}")
        at, parts = _LENGTH.size + length, []
        for head in header["parts"]:
            sections = []
            for size in head["sections"]:
                sections.append(content[at : at + size])
                at += size
            parts.append(_load(head, sections, space, expansion_add))
        return int(header["next_offset"]), parts
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise GraphFailed(f"what it holds does not fit together: {error!r}") from error


def _load(head: dict[str, Any], sections: Sequence[memoryview], space: Space, expansion_add: int) -> Loaded:
    dump, nodes, lengths, ids, rows = sections
    dimension, count = int(head["dimension"]), int(head["all_nodes"])
    graph = Graph(space, dimension, expansion_add)
    graph.load(bytes(dump))
    if len(graph) > count:
        raise GraphFailed(f"its graph has {len(graph)} nodes, {count} were expected")
    generation = Generation(graph)
    generation.allot(count)
    ends = np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64).tolist()
    text = bytes(ids)
    return Loaded(
        namespace=head["namespace"],
        dimension=dimension,
        drift_max=float(head["drift_max"]),
        generation=generation,
        nodes=np.frombuffer(nodes, "<i4").astype(np.intp),
        ids=[text[begin:end].decode() for begin, end in zip([0, *ends[:-1]], ends, strict=True)],
        rows=np.frombuffer(rows, row_type(space)).reshape(len(ends), dimension),
    )
