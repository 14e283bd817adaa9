"""Write docs/protocol-golden-folds.json, histories and their states: `python -m tests.golden.folds`.

The bytes are the same each time. The histories are in `fold_histories.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.delta import Delta, Kind, Operation
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.validate import validate_batch
from tests.golden.fold_histories import NAMESPACE, Change, histories
from tests.wire.duplicate_keys import with_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import Batch

PATH = Path(__file__).parents[2] / "docs" / "protocol-golden-folds.json"
ABOUT = (
    "Histories of facts and the states they fold to, held by tests to this project's sinks and its client "
    "in Node. Deltas come in the order of some log. Bytes are hex, numbers float32 and u32 little-endian, "
    "metadata msgpack; those of a state in canonical form, see the page. Lamport numbers, origins and "
    "counters are text, as they have up to 64 bits. A delta with 'refused' is refused and has no effect."
)


def batch_of(changes: Sequence[Change], namespace: str = NAMESPACE) -> Batch:
    """Encode consecutive changes of one origin as a batch. Metadata keep their bytes."""
    first = changes[0]
    deltas = [Delta(change.vector_id, change.operation, namespace, id=change.id) for change in changes]
    patches = {row: change.patch for row, change in enumerate(changes) if change.patch is not None}
    if not patches:
        return encode_batch(deltas, origin=first.origin, base=first.counter)
    return with_metadata(patches, deltas=deltas, origin=first.origin, base=first.counter)


def states_of(changes: Iterable[Change]) -> dict[str, VectorState]:
    """Fold the changes of each fact that are not refused, with the algebra alone."""
    rows: dict[str, list[Any]] = {}
    ids: dict[str, dict[Key, bytes]] = {}
    for change in changes:
        if refused_field(change) is None:
            batch = batch_of([change])
            rows.setdefault(change.vector_id, []).append((change.key, batch.operation(0), batch.metadata(0)))
            if change.id is not None:
                ids.setdefault(change.vector_id, {})[change.key] = change.id
    return {
        vector_id: fold(vector_rows, without_effect=later_copies(ids.get(vector_id, {})))
        for vector_id, vector_rows in rows.items()
    }


def later_copies(ids: dict[Key, bytes]) -> set[Key]:
    """Return the keys of deltas that repeat the id of a delta earlier in canonical order."""
    earlier_ids: set[bytes] = set()
    copies = set()
    for key in sorted(ids):
        if ids[key] in earlier_ids:
            copies.add(key)
        earlier_ids.add(ids[key])
    return copies


def refused_field(change: Change) -> str | None:
    """Return the field for which a service refuses a delta, whatever its vector's state is.

    Return None for a delta that it accepts, or that a log may hold.
    """
    batch = batch_of([change])
    try:
        validate_batch(batch)
    except InvalidDelta as refusal:
        return None if change.log_only else refusal.field
    return None


def format_delta(change: Change) -> dict[str, Any]:
    """Return a change in the format of the file."""
    operation = change.operation
    formatted: dict[str, Any] = {
        "lamport": str(change.lamport),
        "origin": str(change.origin),
        "counter": str(change.counter),
        "vector_id": change.vector_id,
        "op": int(operation.kind),
    }
    formatted |= _format_operation(operation)
    if change.id is not None:
        formatted["id"] = change.id.hex()
    if change.patch is not None:
        formatted["metadata"] = change.patch.hex()
    if (field := refused_field(change)) is not None:
        formatted["refused"] = {"code": "INVALID_DELTA", "field": field}
    return formatted


def _format_operation(operation: Operation) -> dict[str, str]:
    formatted = {}
    if operation.values is not None:
        formatted["values"] = operation.values.astype("<f4", copy=False).tobytes().hex()
    if operation.indices is not None:
        formatted["indices"] = operation.indices.astype("<u4", copy=False).tobytes().hex()
    if operation.values is None and operation.kind not in (Kind.DELETE, Kind.METADATA):
        formatted["data"] = operation.data.hex()
    return formatted


def format_state(state: VectorState) -> dict[str, Any]:
    """Return a state in the format of the file."""
    assert state.key is not None, "the state of a fact names its last delta"
    alive, vector, data, metadata = state.content
    kind = Kind.DELETE if not alive else Kind.CREATE if vector is not None else Kind.OPAQUE
    formatted: dict[str, Any] = {"op": int(kind)}
    if vector is not None:
        formatted["values"] = vector.hex()
    if data is not None:
        formatted["data"] = data.hex()
    lamport, origin, counter = map(str, state.key)
    formatted |= {"metadata": metadata.hex(), "lamport": lamport, "origin": origin, "counter": counter}
    return formatted | {"ignored": state.ignored}


def format_file() -> str:
    """Format the file, with one line per delta so that a diff is readable."""
    lines = ["{", f' "about": {json.dumps(ABOUT)},', ' "histories": [']
    for name, changes in histories():
        states = {vector_id: format_state(state) for vector_id, state in states_of(changes).items()}
        rows = ",\n".join(f"    {json.dumps(format_delta(change))}" for change in changes)
        lines += ["  {", f'   "name": {json.dumps(name)},', '   "deltas": [', rows, "   ],"]
        lines += [f'   "states": {json.dumps(states)}', "  },"]
    lines[-1] = "  }"
    return "\n".join([*lines, " ]", "}", ""])


def check_canonical(packed: bytes) -> None:
    """Fail unless packed metadata are in canonical form, so that unpacking and packing changes no byte."""
    metadata = msgpack.unpackb(packed, strict_map_key=True)
    assert VectorState(metadata=metadata).content[3] == packed


if __name__ == "__main__":
    PATH.write_text(format_file(), encoding="utf-8")
    print(f"{PATH}: {PATH.stat().st_size} bytes")
