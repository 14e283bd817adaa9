"""JSON lines: one delta per line as a JSON object, for the command line and for files.

Not used on the wire or in the log. A line holds all fields of a delta, so reading a written line gives the
same delta, to the last bit of each number. Messages name no line number; callers add it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from delta_prop_wire.bounds import FLOAT_BOUND, refuse
from delta_prop_wire.delta import ABSENT, Delta, Dot, Kind, Operation, Priority, Source, namespace_of
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.spec import DELTA_BYTES_MAX
from delta_prop_wire.topics import kind_name, kind_names, kind_number
from delta_prop_wire.validate import validate_delta

if TYPE_CHECKING:
    from numpy.typing import NDArray

LINE_BYTES_MAX = 8 * DELTA_BYTES_MAX
"""Enough for any delta: a number takes up to 16 characters for its 4 bytes, and its index a few more."""


def delta_from_line(line: str | bytes | Mapping[str, Any]) -> Delta:
    """Parse one line (or take its parsed object) and validate it. Raises InvalidDelta with field and fix.

    A null field counts as absent; `offset` and `partition`, which `subscribe` adds, are ignored. A line may
    also use the names of the protocol's Delta map, `values` and `data`, for an operation's field.
    """
    fields = dict(line) if isinstance(line, Mapping) else _parse_line(line)
    kind = _parse_kind(fields.get("op"))
    present_fields = {name: value for name, value in fields.items() if value is not None}
    alias = _find_alias(present_fields, kind)
    _check_fields(fields, kind, alias)
    if alias is None:
        return _build_delta(kind, present_fields)
    try:
        return _build_delta(kind, present_fields)
    except InvalidDelta as refused:  # raised again with the name that the line uses
        is_alias = refused.field == _PAYLOADS[kind][0]
        raise InvalidDelta(alias, refused.reason) if is_alias else refused from None


def _build_delta(kind: int, fields: dict[str, Any]) -> Delta:
    """Build and validate a delta from the fields that are present."""
    delta = Delta(
        vector_id=_read_text(fields, "vector_id"),
        operation=_parse_operation(kind, fields),
        namespace=fields.get("namespace", namespace_of(fields["vector_id"])),
        id=_parse_id("id", fields["id"]) if "id" in fields else None,
        dot=_parse_dot("dot", fields["dot"]) if "dot" in fields else None,
        parents=tuple(_parse_parent(entry) for entry in _read_list(fields, "parents")),
        clock=tuple(_parse_dot("clock", entry) for entry in _read_list(fields, "clock")),
        timestamp=fields.get("timestamp", 0),
        priority=Priority(_parse_enum("priority", fields.get("priority", "normal"), Priority)),
        source=Source(_parse_enum("source", fields.get("source", "local"), Source)),
        metadata=fields.get("metadata"),
        topics=tuple(_read_list(fields, "topics")),
        expect=_parse_expect(fields["expect"]) if "expect" in fields else None,
    )
    validate_delta(delta)
    return delta


def delta_to_json(delta: Delta, offset: int | None = None, partition: int | None = None) -> dict[str, Any]:
    """Return the object of a line, without fields that have their default."""
    fields: dict[str, Any] = {} if offset is None else {"offset": offset}
    if partition is not None:
        fields["partition"] = partition
    fields |= {"vector_id": delta.vector_id, "namespace": delta.namespace}
    fields |= {"op": kind_name(delta.operation.kind), **_format_payload(delta.operation)}
    optional = {
        "metadata": delta.metadata if delta.metadata is None else dict(delta.metadata),
        "topics": list(delta.topics) or None,
        "priority": None if delta.priority is Priority.NORMAL else delta.priority.name.lower(),
        "source": None if delta.source is Source.LOCAL else delta.source.name.lower(),
        "id": None if delta.id is None else delta.id.hex(),
        "dot": None if delta.dot is None else str(delta.dot),
        "parents": [parent.hex() if isinstance(parent, bytes) else str(parent) for parent in delta.parents]
        or None,
        "clock": [str(entry) for entry in delta.clock] or None,
        "timestamp": delta.timestamp or None,
        "expect": _format_expect(delta.expect) if delta.expect is not None else None,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


def to_line(delta: Delta, offset: int | None = None, partition: int | None = None) -> str:
    """Return the line without a line end; characters beyond ASCII are not escaped."""
    return json.dumps(delta_to_json(delta, offset, partition), ensure_ascii=False, allow_nan=False)


_PAYLOADS: dict[int, tuple[str, ...]] = {
    Kind.CREATE: ("vector",),
    Kind.DENSE: ("vector",),
    Kind.SPARSE: ("indices", "values"),
    Kind.SPARSE_ADD: ("indices", "values"),
    Kind.SCALE: ("factor",),
    Kind.OFFSET: ("amount",),
    Kind.TRANSFORM: ("name",),
    Kind.DELETE: (),
    Kind.METADATA: (),
}
"""The fields of a line that hold an operation's operands, by its kind."""
_OPAQUE_PAYLOAD = ("data",)
"""The field of opaque and unknown kinds: their bytes in base64."""
_FIELD_ALIASES: dict[int, str] = {
    Kind.CREATE: "values",
    Kind.DENSE: "values",
    Kind.SCALE: "values",
    Kind.OFFSET: "values",
    Kind.TRANSFORM: "data",
}
"""By kind: what a Delta map (docs/protocol.md) calls the operation's field, if lines call it otherwise."""
_FIELDS = frozenset(
    {"vector_id", "namespace", "op", "metadata", "topics", "priority", "source", "offset", "partition"}
    | {"id", "dot", "parents", "clock", "timestamp", "expect"}
)
ABSENT_TEXT = "absent"
"""The `expect` of a line whose vector must not exist."""
_JSON_WORDS = {list: "an array", str: "text", int: "a number", float: "a number"}
"""How messages name values that are not objects; null, true and false are written as they are."""
_DOT = re.compile(r"([0-9a-fA-F]{16}):([0-9]{1,19})")
_ID = re.compile(r"[0-9a-fA-F]{32}")


# --- reading


def _parse_line(line: str | bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        refuse("line", f"more than {LINE_BYTES_MAX} bytes: split the delta")
    try:
        text = line if isinstance(line, str) else str(line, "utf-8-sig")
        fields = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_build_object)
    except UnicodeDecodeError as error:
        refuse("line", f"byte {error.start} is not UTF-8: save the file as UTF-8")
    except RecursionError:
        refuse("line", "nested too deep: flatten it")
    except json.JSONDecodeError as error:
        refuse("line", f"not JSON, character {error.pos + 1}: {error.msg}: write one object per line")
    except ValueError:  # a whole number has more digits than Python converts
        refuse("line", "a number of too many digits: shorten it")
    if not isinstance(fields, dict):
        value = _JSON_WORDS.get(type(fields)) or json.dumps(fields)
        refuse("line", f"{value}, not an object: write one object per line")
    return fields


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        refuse("line", f"the key {duplicate!r:.40} occurs twice in one object: leave one of them out")
    return members


def _refuse_constant(name: str) -> NoReturn:
    refuse("line", f"{name} is not JSON; numbers must be finite and within {FLOAT_BOUND}: leave it out")


def _parse_kind(name: object) -> int:
    kind = kind_number(name) if isinstance(name, str) else -1
    if kind < 0:
        problem = "missing" if name is None else f"{name!r:.40} is unknown"
        refuse("op", f"{problem}: give one of {kind_names()}")
    return kind


def _find_alias(fields: dict[str, Any], kind: int) -> str | None:
    """Return the name of the operation's field in a Delta map if the line uses that name, else None."""
    alias = _FIELD_ALIASES.get(kind)
    if alias is None or alias not in fields:
        return None
    (line_name,) = _PAYLOADS[kind]
    if line_name in fields:
        refuse(alias, f"given besides {line_name}, which means the same: leave one of them out")
    return alias


def _check_fields(fields: dict[str, Any], kind: int, alias: str | None) -> None:
    payload = _PAYLOADS.get(kind, _OPAQUE_PAYLOAD)
    required = payload if alias is None else (alias,)
    for name in required:
        if fields.get(name) is None:
            alternative = f" (or {_FIELD_ALIASES[kind]})" if kind in _FIELD_ALIASES else ""
            refuse(name, f"missing: {kind_name(kind)} needs {' and '.join(payload)}{alternative}")
    for name in fields:
        if name not in _FIELDS and name not in payload and name != _FIELD_ALIASES.get(kind):
            known = sorted({*payload, *_FIELDS})
            refuse(str(name)[:40], f"not a field of {kind_name(kind)}: use {', '.join(known)}")


def _parse_operation(kind: int, fields: dict[str, Any]) -> Operation:
    if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
        return Operation(kind, _parse_numbers("values", fields["values"]), _parse_indices(fields["indices"]))
    if _FIELD_ALIASES.get(kind) == "values":
        if "values" in fields:
            return Operation(kind, _parse_numbers("values", fields["values"]))
        (line_name,) = _PAYLOADS[kind]
        return Operation(
            kind,
            _parse_numbers(line_name, fields[line_name] if line_name == "vector" else [fields[line_name]]),
        )
    if kind == Kind.TRANSFORM and "name" in fields:
        return Operation(kind, data=_read_text(fields, "name").encode("utf-8", "surrogatepass"))
    if kind in (Kind.DELETE, Kind.METADATA):
        return Operation(kind)
    try:
        return Operation(kind, data=base64.b64decode(_read_text(fields, "data"), validate=True))
    except (binascii.Error, ValueError) as error:
        refuse("data", f"not base64 ({error}): encode the bytes with the standard alphabet and padding")


def _parse_numbers(field: str, value: object) -> NDArray[np.float32]:
    if not isinstance(value, (list, tuple)):
        refuse(field, f"{value!r:.40} is not a list: give a list of numbers")
    if not set(map(type, value)) <= {int, float}:
        position = next(position for position, number in enumerate(value) if type(number) not in (int, float))
        refuse(field, f"number {position} is {value[position]!r:.40}: give numbers only")
    try:
        with np.errstate(over="ignore"):
            return np.array(value, np.float32)  # a number too large becomes infinite; validation refuses it
    except OverflowError:
        refuse(field, f"a number is too large; numbers must be within {FLOAT_BOUND}: clamp it")


INDEX_MAX = 0xFFFFFFFF


def _parse_indices(value: object) -> NDArray[np.uint32]:
    if not isinstance(value, (list, tuple)):
        refuse("indices", f"{value!r:.40} is not a list: give a list of whole numbers")
    for position, index in enumerate(value):
        if type(index) is not int or not 0 <= index <= INDEX_MAX:
            refuse(
                "indices",
                f"{index!r:.40} at position {position} is not a whole number from 0 to {INDEX_MAX}: "
                "count from 0",
            )
    return np.array(value, np.uint32)


def _read_text(fields: dict[str, Any], field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str):
        refuse(
            field, "missing: give text" if value is None else f"{value!r:.40} is not text: put it in quotes"
        )
    return value


def _read_list(fields: dict[str, Any], field: str) -> list[Any]:
    value = fields.get(field, [])
    if not isinstance(value, (list, tuple)):
        refuse(field, f"{value!r:.40} is not a list: put it in brackets")
    return list(value)


def _parse_id(field: str, value: object) -> bytes:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        refuse(field, f"{value!r:.60} is not an id: give its 16 bytes as 32 hex digits")
    return bytes.fromhex(value)


def _parse_dot(field: str, value: object) -> Dot:
    match = _DOT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        refuse(field, f"{value!r:.60} is not a dot: give ORIGIN:COUNTER, 16 hex digits and a number")
    return Dot(int(match[1], 16), int(match[2]))


def _parse_expect(value: object) -> Dot:
    return ABSENT if value == ABSENT_TEXT else _parse_dot("expect", value)


def _format_expect(expect: Dot) -> str:
    return ABSENT_TEXT if expect == ABSENT else str(expect)


def _parse_parent(value: object) -> Dot | bytes:
    return (
        _parse_dot("parents", value)
        if isinstance(value, str) and ":" in value
        else _parse_id("parents", value)
    )


def _parse_enum(field: str, value: object, members: type[IntEnum]) -> int:
    known = {member.name.lower(): int(member) for member in members}
    if not isinstance(value, str) or value not in known:
        refuse(field, f"{value!r:.40} is unknown: give one of {', '.join(known)}")
    return known[value]


# --- writing


def _format_payload(operation: Operation) -> dict[str, Any]:
    values = _to_shortest(operation.values) if operation.values is not None else []
    names = _PAYLOADS.get(operation.kind, _OPAQUE_PAYLOAD)
    if names == ("indices", "values"):
        indices = [] if operation.indices is None else operation.indices.tolist()
        return {"indices": indices, "values": values}
    if names in (("factor",), ("amount",)):
        return {names[0]: values[0]}
    if names == ("name",):
        return {"name": str(operation.data, "utf-8", "replace")}
    if names == _OPAQUE_PAYLOAD:
        return {"data": base64.b64encode(operation.data).decode("ascii")}
    return dict.fromkeys(names, values)


def _to_shortest(values: NDArray[np.float32]) -> list[float]:
    """Return doubles with the shortest text that gives the same float32: 0.1, not 0.10000000149011612."""
    return [float(text) for text in values.astype("U32").tolist()]
