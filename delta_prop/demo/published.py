"""Published deltas as JSON lines, and what they fold to in plain lists.

On purpose this shares nothing with the algebra, the codec or the sinks that it is compared with: its few
lines can be checked by eye, and a fault of theirs cannot hide in it.
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

Mark = tuple[Key, str, int]
"""What is compared of one delta in a stream: whose it is, its operation, a checksum of its numbers."""

_NAMES = {0: "create", 1: "sparse", 2: "dense", 6: "delete", 7: "sparse_add"}


@dataclass(slots=True)
class Folded:
    """The state of every vector after all lines, and the lines' marks in order."""

    vectors: dict[Key, list[float]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)

    def add(self, line: str) -> None:
        """One more line; it sets what it says, or adds it."""
        delta = json.loads(line)
        key = (delta["namespace"], delta["vector_id"])
        if delta["op"] == "delete":
            self.vectors.pop(key, None)
        elif delta["op"] == "sparse":
            for index, value in zip(delta["indices"], delta["values"], strict=True):
                self.vectors[key][index] = value
        elif delta["op"] == "sparse_add":
            for index, value in zip(delta["indices"], delta["values"], strict=True):
                # A double holds the sum of two float32 closely enough to be rounded once, to the right one.
                self.vectors[key][index] = array("f", [self.vectors[key][index] + value])[0]
        else:
            self.vectors[key] = delta["vector"]
        self.marks.append(_mark_of_form(delta))


def create_line(namespace: str, vector_id: str, vector: NDArray[np.float32]) -> str:
    """The line of a create; most numbers are 0, and written as such."""
    numbers = ["0"] * len(vector)
    places = vector.view("u4").nonzero()[0]  # by their bits: -0.0 is another number than 0.0
    for place, number in zip(places.tolist(), vector[places].tolist(), strict=True):
        numbers[place] = repr(number)
    head = json.dumps({"vector_id": vector_id, "namespace": namespace, "op": "create"})
    return f'{head[:-1]}, "vector": [{", ".join(numbers)}]}}\n'


def line_of(delta: Delta) -> str:
    """The line of any delta that the demo publishes."""
    operation = delta.operation
    fields: dict[str, Any] = {"vector_id": delta.vector_id, "namespace": delta.namespace}
    fields["op"] = _NAMES[operation.kind]
    if operation.indices is not None and operation.values is not None:
        fields |= {"indices": operation.indices.tolist(), "values": operation.values.tolist()}
    elif operation.values is not None:
        fields["vector"] = operation.values.tolist()
    return json.dumps(fields) + "\n"


def fold(lines: Iterable[str]) -> Folded:
    """Read lines in order."""
    folded = Folded()
    for line in lines:
        folded.add(line)
    return folded


def logged_mark(line: str) -> tuple[int, Mark]:
    """The offset and the mark of a line that a sink of JSON lines wrote."""
    form = json.loads(line)
    return form["offset"], _mark_of_form(form)


def checksum(numbers: Sequence[float], indices: Sequence[int]) -> int:
    """A checksum of float32 numbers and of the indices that they belong to."""
    return crc32(array("I", indices).tobytes(), crc32(array("f", numbers).tobytes()))


def mark_of(delta: Delta) -> Mark:
    """The mark of a delta as a subscriber got it."""
    operation = delta.operation
    values = b"" if operation.values is None else operation.values.tobytes()
    indices = b"" if operation.indices is None else operation.indices.tobytes()
    return (delta.namespace, delta.vector_id), _NAMES[operation.kind], crc32(indices, crc32(values))


def _mark_of_form(form: dict[str, Any]) -> Mark:
    numbers = form.get("values", form.get("vector", ()))
    return (form["namespace"], form["vector_id"]), form["op"], checksum(numbers, form.get("indices", ()))
