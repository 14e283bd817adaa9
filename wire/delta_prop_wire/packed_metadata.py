"""Metadata changes as they travel: the bytes of one msgpack map, in a Delta frame or in a batch.

Pure. `read_packed` checks that the bytes are one map; if they are not, the frame is bad. `packed_json_fault`
checks that the map is JSON within bounds; if it is not, the delta is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgpack

from delta_prop_wire.spec import METADATA_BYTES_MAX, METADATA_DEPTH_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALL_BYTES = 512
"""Up to this many bytes cannot announce anything costly; longer maps are walked before they are built."""
_DEPTH_MAX = 63
"""No reader runs out of stack at this many levels; a valid change has fewer."""
_NOT_JSON_LEADS = re.compile(rb"[\xc4-\xc9\xd4-\xd8]")
"""Lead bytes of binary and extension types; inside text and numbers the same bytes mean something else."""
_MAP_LEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})


class PackedMetadata(Mapping[str, Any]):
    """A metadata change as its producer packed it, unpacked on first access.

    Read members only after `packed_json_fault` has found no fault.
    """

    __slots__ = ("_members", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self._members: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        """Return the value of a member."""
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of members."""
        return iter(self._read())

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._read())

    def __repr__(self) -> str:
        """Return the bytes, since the members may not be readable."""
        return f"PackedMetadata({self.packed!r})"

    def _read(self) -> dict[str, Any]:
        if self._members is None:
            self._members = msgpack.unpackb(self.packed, strict_map_key=True)
        return self._members


def read_packed(packed: Buffer, bytes_max: int = METADATA_BYTES_MAX) -> dict[str, Any] | None:
    """Read a metadata change. Raises ValueError if the bytes are not one msgpack map.

    Returns None for a map that breaks the bounds of deltas so far that nothing may read it: it is too long,
    much too deep, or has keys, binary values or extension types that JSON does not have. Of a duplicate key
    the last value counts.
    """
    size = len(memoryview(packed))
    if size > _SMALL_BYTES:
        check_map(packed)
        if size > bytes_max:
            return None
    try:
        members = msgpack.unpackb(packed, strict_map_key=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"a text in it is not UTF-8: {error.reason}") from None
    except (ValueError, msgpack.UnpackException):
        check_map(packed)
        return None
    if not isinstance(members, dict):
        raise ValueError(f"it is of type {type(members).__name__}, not a map")
    if size > _SMALL_BYTES and _is_too_deep(members):
        return None
    return None if _NOT_JSON_LEADS.search(packed) and _has_non_json(members) else members


def _has_non_json(value: object) -> bool:
    """True if a binary or an extension type is among the members."""
    pending = [value]
    while pending:
        member = pending.pop()
        if isinstance(member, dict):
            pending += member.values()
        elif isinstance(member, list):
            pending += member
        elif isinstance(member, (bytes, msgpack.ExtType, msgpack.Timestamp)):
            return True
    return False


def _is_too_deep(value: object) -> bool:
    containers = [value]
    for _ in range(_DEPTH_MAX):
        containers = [
            inner
            for outer in containers
            for inner in (outer.values() if isinstance(outer, dict) else cast("list[object]", outer))
            if isinstance(inner, (dict, list))
        ]
        if not containers:
            return False
    return True


def check_map(packed: Buffer) -> None:
    """Raise ValueError unless the bytes are exactly one msgpack map, with any members."""
    view = memoryview(packed)
    if not view or view[0] not in _MAP_LEADS:
        raise ValueError("it is not a map")
    unpacker = msgpack.Unpacker(read_size=len(view), max_buffer_size=len(view))
    unpacker.feed(view)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ValueError("it ends too early") from None
    except msgpack.StackError:
        raise ValueError("it is nested too deep to be parsed") from None
    except msgpack.FormatError:
        raise ValueError("a byte in it is 0xc1, which msgpack does not have") from None
    if unpacker.tell() != len(view):
        raise ValueError(f"{len(view) - unpacker.tell()} bytes follow it")


def packed_json_fault(packed: Buffer) -> str | None:
    """Return the reason why a metadata change, one msgpack map, is not JSON; None if it is."""
    try:
        patch = msgpack.unpackb(packed, strict_map_key=False, object_pairs_hook=_reject_duplicates)
    except _NotJsonError as fault:
        return str(fault)
    except ValueError:  # the only remaining fault: a timestamp of a wrong length
        return "an extension type is not JSON: use text and numbers"
    return json_fault(patch, METADATA_DEPTH_MAX)


class _NotJsonError(Exception):
    """A key that a JSON object cannot have."""


def _reject_duplicates(pairs: list[tuple[object, object]]) -> dict[object, object]:
    try:
        members = dict(pairs)
    except TypeError:
        raise _NotJsonError("a key is a list or an object: use text as keys") from None
    if len(members) != len(pairs):
        duplicate = _first_duplicate([key for key, _ in pairs])
        raise _NotJsonError(f"the key {duplicate!r:.40} occurs twice: name each key of an object once")
    return members


def _first_duplicate(keys: list[object]) -> object:
    earlier_keys: set[object] = set()
    for key in keys:
        if key in earlier_keys:
            return key
        earlier_keys.add(key)
    raise AssertionError("no key occurs twice")


def json_fault(value: object, levels_left: int) -> str | None:
    """Return the reason why a value is not JSON of up to `levels_left` levels, with the path to the fault.

    Return None if it is.
    """
    if value is None or isinstance(value, (str, bool)):
        return None
    if isinstance(value, int):
        fits = -(1 << 63) <= value < 1 << 64
        return None if fits else "a whole number of more than 64 bits: send it as text"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not JSON: leave it out or send null"
    if isinstance(value, msgpack.ExtType):  # checked before tuples, since it is a tuple
        return "an extension type is not JSON: use text and numbers"
    if levels_left == 0:
        return f"nested deeper than {METADATA_DEPTH_MAX} levels: flatten it"
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                return f"the key {name!r:.40} is of type {type(name).__name__}: use text as keys"
            fault = json_fault(inner, levels_left - 1)
            if fault:
                return f"{name[:40]}: {fault}"
        return None
    if isinstance(value, (list, tuple)):
        faults = (json_fault(inner, levels_left - 1) for inner in value)
        return next((f"[{index}]: {fault}" for index, fault in enumerate(faults) if fault), None)
    return (
        f"a value of type {type(value).__name__} is not JSON: "
        "use text, numbers, true, false, null, lists and objects"
    )
