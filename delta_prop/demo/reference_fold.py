"""Writes published deltas as JSON lines, and folds them in plain lists.

On purpose this module shares no code with the algebra, the codec and the sinks whose results it is compared
with: its few lines can be checked by eye, and share no defect with them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_wire.delta import Delta

Key = tuple[str, str]
"""Namespace and vector id."""

Fingerprint = tuple[Key, str, int]
"""What is compared of a delta in a stream: its vector, its operation, a checksum of its numbers."""

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
                # A double holds the sum of two float32 numbers precisely enough for a correct rounding.
                self.vectors[key][index] = array("f", [self.vectors[key][index] + value])[0]
        else:
            self.vectors[key] = delta["vector"]
        self.fingerprints.append(_fingerprint_of_json(delta))


def create_line(namespace: str, vector_id: str, vector: NDArray[np.float32]) -> str:
    """Return the line of a create, quickly: most numbers are 0."""
    numbers = ["0"] * len(vector)
    indices = vector.view("u4").nonzero()[0]  # compared as bits, so that -0.0 differs from 0.0
    for index, number in zip(indices.tolist(), vector[indices].tolist(), strict=True):
        numbers[index] = repr(number)
    object_text = json.dumps({"vector_id": vector_id, "namespace": namespace, "op": "create"})
    return f'{object_text[:-1]}, "vector": [{", ".join(numbers)}]}}\n'


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


def parse_logged_line(line: str) -> tuple[int, Fingerprint]:
    """Return the offset and the fingerprint of a line that a JSON lines sink wrote."""
    fields = json.loads(line)
    return fields["offset"], _fingerprint_of_json(fields)


def compute_checksum(numbers: Sequence[float], indices: Sequence[int]) -> int:
    """Return a checksum of float32 numbers and of their indices."""
    return crc32(array("I", indices).tobytes(), crc32(array("f", numbers).tobytes()))


def fingerprint_of(delta: Delta) -> Fingerprint:
    """Return the fingerprint of a delta that a subscriber has received."""
    operation = delta.operation
    values = b"" if operation.values is None else operation.values.tobytes()
    indices = b"" if operation.indices is None else operation.indices.tobytes()
    return (delta.namespace, delta.vector_id), _OPERATION_NAMES[operation.kind], crc32(indices, crc32(values))


def _fingerprint_of_json(fields: dict[str, Any]) -> Fingerprint:
    numbers = fields.get("values", fields.get("vector", ()))
    return (
        (fields["namespace"], fields["vector_id"]),
        fields["op"],
        compute_checksum(numbers, fields.get("indices", ())),
    )
