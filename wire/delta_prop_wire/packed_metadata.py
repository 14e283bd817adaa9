"""Metadata changes as they travel: the bytes of one msgpack map, in a Delta frame and in a batch alike.

Pure. Two questions are asked of them: whether they are one map at all, which is a matter of frames
(`read_packed`), and whether what that says is JSON within bounds, which is one of deltas (`json_fault_of`).
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
"""What so few bytes can announce costs nothing; more is walked before it is built."""
_DEPTH_MAX = 63
"""No reader runs out of stack for so many levels; those of a sound change are fewer."""
_NOT_JSON_LEADS = re.compile(rb"[\xc4-\xc9\xd4-\xd8]")
"""What a binary or an extension type begins with; in text and numbers these bytes mean something else."""
_MAP_LEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})


class PackedMetadata(Mapping[str, Any]):
    """A metadata change as its producer packed it, read when first asked for.

    Ask for members only of one that `json_fault_of` has passed.
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
        """Return how many members there are."""
        return len(self._read())

    def __repr__(self) -> str:
        """Return the bytes: what they say may not be readable."""
        return f"PackedMetadata({self.packed!r})"

    def _read(self) -> dict[str, Any]:
        if self._members is None:
            self._members = msgpack.unpackb(self.packed, strict_map_key=True)
        return self._members


def read_packed(packed: Buffer, bytes_max: int = METADATA_BYTES_MAX) -> dict[str, Any] | None:
    """Read a metadata change. Raises ValueError where these bytes are not one msgpack map.

    None where they are one that breaks the bounds of deltas so far that nobody is to read it: it is too long,
    much too deep, or has keys, binaries or extension types, which JSON has not. Of a key that stands twice
    the last value counts.
    """
    size = len(memoryview(packed))
    if size > _SMALL_BYTES:
        check_whole(packed)
        if size > bytes_max:
            return None
    try:
        found = msgpack.unpackb(packed, strict_map_key=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"a text in it is not UTF-8: {error.reason}") from None
    except (ValueError, msgpack.UnpackException):
        check_whole(packed)
        return None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not a map")
    if size > _SMALL_BYTES and _is_deep(found):
        return None
    return None if _NOT_JSON_LEADS.search(packed) and _is_foreign(found) else found


def _is_foreign(value: object) -> bool:
    """Return True if a binary or an extension type is among the members."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, (bytes, msgpack.ExtType, msgpack.Timestamp)):
            return True
    return False


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else cast("list[object]", outer))
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def check_whole(packed: Buffer) -> None:
    """Raise ValueError unless these bytes are one msgpack map from end to end, whatever its members are."""
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


def json_fault_of(packed: Buffer) -> str | None:
    """Return what keeps a metadata change, one msgpack map, from being JSON; None where nothing does."""
    try:
        patch = msgpack.unpackb(packed, strict_map_key=False, object_pairs_hook=_unique)
    except _NotJsonError as fault:
        return str(fault)
    except ValueError:  # all that can still be wrong is a timestamp of another length than timestamps have
        return "an extension type is not JSON: use text and numbers"
    return json_fault(patch, METADATA_DEPTH_MAX)


class _NotJsonError(Exception):
    """An object of JSON cannot have these keys."""


def _unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
    try:
        found = dict(pairs)
    except TypeError:
        raise _NotJsonError("a key is a list or an object: keys are text") from None
    if len(found) != len(pairs):
        twice = _first_repeated([key for key, _ in pairs])
        raise _NotJsonError(f"the key {twice!r:.40} stands twice: name each key of an object once")
    return found


def _first_repeated(keys: list[object]) -> object:
    seen: set[object] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("each key is there once")


def json_fault(value: object, depth: int) -> str | None:
    """Find what keeps a value from being JSON, with its place; None: nothing does."""
    if value is None or isinstance(value, (str, bool)):
        return None
    if isinstance(value, int):
        fits = -(1 << 63) <= value < 1 << 64
        return None if fits else "a whole number of more than 64 bits: send it as text"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not JSON: leave it out or send null"
    if isinstance(value, msgpack.ExtType):  # a tuple, so before those
        return "an extension type is not JSON: use text and numbers"
    if depth == 0:
        return f"nested deeper than {METADATA_DEPTH_MAX} levels: flatten it"
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                return f"the key {name!r:.40} is a {type(name).__name__}: keys are text"
            fault = json_fault(inner, depth - 1)
            if fault:
                return f"{name[:40]}: {fault}"
        return None
    if isinstance(value, (list, tuple)):
        faults = (json_fault(inner, depth - 1) for inner in value)
        return next((f"[{place}]: {fault}" for place, fault in enumerate(faults) if fault), None)
    return f"a {type(value).__name__} is not JSON: use text, numbers, true, false, null, lists and objects"
