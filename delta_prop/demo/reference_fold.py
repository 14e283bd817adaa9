"""Published deltas as JSON lines, and their fold in plain lists.

On purpose this shares nothing with the algebra, the codec or the sinks that it is compared with: its few
lines can be checked by eye, and share no fault with them.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_wire.delta import Delta

Key = tuple[str, str]
"""Namespace and vector id."""

Fingerprint = tuple[Key, str, int]
"""Compared parts of one delta in a stream: its vector, its operation, a checksum of its numbers."""

_OPERATION_NAMES = {0: "create", 1: "sparse", 2: "dense", 6: "delete", 7: "sparse_add"}


@dataclass(slots=True)
class ReferenceFold:
    """The state of every vector after all lines, and the lines' fingerprints in order."""

    vectors: dict[Key, list[float]] = field(default_factory=dict)
    fingerprints: list[Fingerprint] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Fold one more line."""
        delta = json.loads(line)
        key = (delta["namespace"], delta["vector_id"])
        if delta["op"] == "delete":
            self.vectors.pop(key, None)
        elif delta["op"] == "sparse":
            for index, value in zip(delta["indices"], delta["values"], strict=True):
                self.vectors[key][index] = value
        elif delta["op"] == "sparse_add":
            for index, value in zip(delta["indices"], delta["values"], strict=True):
                # A double holds the sum of two float32 precisely enough to be rounded correctly.
                self.vectors[key][index] = array("f", [self.vectors[key][index] + value])[0]
        else:
            self.vectors[key] = delta["vector"]
        self.fingerprints.append(_fingerprint_of_json(delta))


def create_line(namespace: str, vector_id: str, vector: NDArray[np.float32]) -> str:
    """Return the line of a create; most numbers are 0, and written as such."""
    numbers = ["0"] * len(vector)
    indices = vector.view("u4").nonzero()[0]  # by their bits: -0.0 is another number than 0.0
    for index, number in zip(indices.tolist(), vector[indices].tolist(), strict=True):
        numbers[index] = repr(number)
    head = json.dumps({"vector_id": vector_id, "namespace": namespace, "op": "create"})
    return f'{head[:-1]}, "vector": [{", ".join(numbers)}]}}\n'


def line_of(delta: Delta) -> str:
    """Return the line of any delta that the demo publishes."""
    operation = delta.operation
    fields: dict[str, Any] = {"vector_id": delta.vector_id, "namespace": delta.namespace}
    fields["op"] = _OPERATION_NAMES[operation.kind]
    if operation.indices is not None and operation.values is not None:
        fields |= {"indices": operation.indices.tolist(), "values": operation.values.tolist()}
    elif operation.values is not None:
        fields["vector"] = operation.values.tolist()
    return json.dumps(fields) + "\n"


def fold(lines: Iterable[str]) -> ReferenceFold:
    """Fold lines in order."""
    folded = ReferenceFold()
    for line in lines:
        folded.add(line)
    return folded


def parse_logged_line(line: str) -> tuple[int, Fingerprint]:
    """Return the offset and the fingerprint of a line that a JSON lines sink wrote."""
    form = json.loads(line)
    return form["offset"], _fingerprint_of_json(form)


def compute_checksum(numbers: Sequence[float], indices: Sequence[int]) -> int:
    """Return a checksum of float32 numbers and of their indices."""
    return crc32(array("I", indices).tobytes(), crc32(array("f", numbers).tobytes()))


def fingerprint_of(delta: Delta) -> Fingerprint:
    """Return the fingerprint of a delta that a subscriber got."""
    operation = delta.operation
    values = b"" if operation.values is None else operation.values.tobytes()
    indices = b"" if operation.indices is None else operation.indices.tobytes()
    return (delta.namespace, delta.vector_id), _OPERATION_NAMES[operation.kind], crc32(indices, crc32(values))


def _fingerprint_of_json(form: dict[str, Any]) -> Fingerprint:
    numbers = form.get("values", form.get("vector", ()))
    return (
        (form["namespace"], form["vector_id"]),
        form["op"],
        compute_checksum(numbers, form.get("indices", ())),
    )
