"""Reads msgpack maps from a peer within limits, field by field, and packs maps.

`check_structure` walks a map before msgpack builds anything, so that a few bytes cannot make it allocate
gigabytes. Every failure is a ProtocolError (BAD_FRAME) that names the frame and the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgpack

from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from typing_extensions import Buffer

    E = TypeVar("E", bound=IntEnum)

T = TypeVar("T")
D = TypeVar("D")

DEPTH_MAX = 64
ITEMS_MAX = 131_072
"""More items than a delta with the longest clock and the largest metadata change can have."""
U16_MAX = (1 << 16) - 1
U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1


pack: Callable[[object], bytes] = msgpack.Packer().pack  # shared, since making one takes longer than packing


def pack_map(fields: dict[str, Any]) -> bytes:
    """Pack fields as one msgpack map, without those that are None."""
    return pack({name: value for name, value in fields.items() if value is not None})


def unpack_map(frame: str, packed: Buffer) -> Fields:
    """Read `packed` as one map. Raises ProtocolError, naming `frame`."""
    view = memoryview(packed)
    try:
        check_structure(view)
        members = msgpack.unpackb(view, object_pairs_hook=_reject_duplicates, ext_hook=_reject_extension)
    except ValueError as error:  # includes UnicodeDecodeError and all errors of msgpack
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"{frame}: the payload is not a valid msgpack map: {error}"
        ) from None
    if not isinstance(members, dict):
        raise ProtocolError(
            ErrorCode.BAD_FRAME,
            f"{frame}: the payload is of type {type(members).__name__}: send one msgpack map",
        )
    return Fields(frame, members)


class Fields:
    """The fields of one map. Unknown fields are ignored; nil counts as absent."""

    __slots__ = ("_frame", "_values")

    def __init__(self, frame: str, values: dict[str, Any]) -> None:
        self._frame = frame
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def require(self, name: str, read_value: Callable[[Any], T]) -> T:
        """Return the field as `read_value` converts it. Raises ProtocolError if it is missing or invalid."""
        value = self._values.get(name)
        if value is None:
            self.refuse(name, "is missing: send it")
        return self._convert(name, value, read_value)

    def get(self, name: str, read_value: Callable[[Any], T], default: D) -> T | D:
        """Return the field as `read_value` converts it, `default` if it is absent. Raises ProtocolError."""
        value = self._values.get(name)
        return default if value is None else self._convert(name, value, read_value)

    def require_map(self, name: str) -> Fields:
        """Return the fields of the map in a field. Raises ProtocolError if it is missing or not a map."""
        return Fields(f"{self._frame}.{name}", self.require(name, mapping))

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise the ProtocolError that names the field."""
        raise ProtocolError(ErrorCode.BAD_FRAME, f"{self._frame}: field {name!r} {why}")

    def _convert(self, name: str, value: Any, read_value: Callable[[Any], T]) -> T:
        try:
            return read_value(value)
        except ValueError as error:
            self.refuse(name, str(error))


def truncate(message: str, bytes_max: int) -> str:
    """Return a message shortened to `bytes_max` bytes of UTF-8.

    A refusal often quotes the refused value, and must not become too long itself.
    """
    return message.encode(errors="replace")[:bytes_max].decode(errors="ignore")


# --- readers: each converts a value from msgpack, or raises ValueError that names the expected form


def uint(maximum: int = U64_MAX, minimum: int = 0) -> Callable[[Any], int]:
    """Return a reader of whole numbers from `minimum` to `maximum`."""

    def read(value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(f"is {_format_value(value)}: send a whole number from {minimum} to {maximum}")
        return value

    return read


def text(bytes_max: int) -> Callable[[Any], str]:
    """Return a reader of strings of up to `bytes_max` bytes of UTF-8."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"is {_format_value(value)}: send a string")
        size = len(value.encode())
        if size > bytes_max:
            raise ValueError(f"has {size} bytes: send up to {bytes_max}")
        return value

    return read


def blob(bytes_min: int, bytes_max: int) -> Callable[[Any], bytes]:
    """Return a reader of binary values of `bytes_min` to `bytes_max` bytes."""

    def read(value: Any) -> bytes:
        if not isinstance(value, bytes) or not bytes_min <= len(value) <= bytes_max:
            bounds = f"{bytes_min}" if bytes_min == bytes_max else f"{bytes_min} to {bytes_max}"
            raise ValueError(f"is {_format_value(value)}: send binary of {bounds} bytes")
        return value

    return read


def number(value: Any) -> float:
    """Read a finite number that is not negative."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"is {_format_value(value)}: send a finite number from 0 up")
    return float(value)


def flag(value: Any) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"is {_format_value(value)}: send true or false")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Read a map with string keys."""
    if not isinstance(value, dict):
        raise ValueError(f"is {_format_value(value)}: send a map")
    return value


def one_of(numbers: type[E]) -> Callable[[Any], E]:
    """Return a reader of the members of an enumeration, which travel as numbers."""

    def read(value: Any) -> E:
        if type(value) is not int or value not in numbers._value2member_map_:
            known = ", ".join(f"{int(member)} {member.name.lower()}" for member in numbers)
            raise ValueError(f"is {_format_value(value)}: send one of {known}")
        return numbers(value)

    return read


def list_of(read_item: Callable[[Any], T], count_max: int) -> Callable[[Any], tuple[T, ...]]:
    """Return a reader of arrays of up to `count_max` items."""

    def read(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError(f"is {_format_value(value)}: send an array")
        if len(value) > count_max:
            raise ValueError(f"has {len(value)} items: send up to {count_max}")
        return tuple([read_item(item) for item in value])

    return read


def record(*readers: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a reader of arrays with one item for each of `readers`, in their order."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise ValueError(f"is {_format_value(value)}: send an array of {len(readers)} items")
        return tuple([reader(item) for reader, item in zip(readers, value, strict=True)])

    return read


# --- structure

_SCALAR, _BYTES, _ARRAY, _MAP, _REFUSED = range(5)


def _lead_byte_table() -> tuple[tuple[int, int, int], ...]:
    """Return for each lead byte: its form, the size of the length field after it, and the length.

    If a length field follows, the length here is 0. Else the lead byte determines the length.
    """
    forms = [(_SCALAR, 0, 0)] * 256
    for i in range(16):
        forms[0x80 + i], forms[0x90 + i] = (_MAP, 0, i), (_ARRAY, 0, i)
    for i in range(32):
        forms[0xA0 + i] = (_BYTES, 0, i)
    for i in range(3):
        forms[0xC4 + i] = forms[0xD9 + i] = (_BYTES, 1 << i, 0)
    for i in range(2):
        forms[0xCA + i] = (_SCALAR, 0, 4 << i)
        forms[0xDC + i], forms[0xDE + i] = (_ARRAY, 2 << i, 0), (_MAP, 2 << i, 0)
    for i in range(4):
        forms[0xCC + i] = forms[0xD0 + i] = (_SCALAR, 0, 1 << i)
    for lead in (0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
        forms[lead] = (_REFUSED, 0, 0)
    return tuple(forms)


_LEAD_BYTES = _lead_byte_table()


def check_structure(packed: memoryview) -> None:
    """Walk one msgpack value. Raises ValueError unless it fills `packed`, is shallow and complete.

    Each announced item must be present, and there is a maximum of items, which bounds the memory and time of
    decoding.
    """
    size, position, announced_items = len(packed), 0, 1
    unread_items = [1]  # for each depth
    while unread_items:
        if not unread_items[-1]:
            unread_items.pop()
            continue
        unread_items[-1] -= 1
        if position >= size:
            raise ValueError("it ends too early")
        form, width, length = _LEAD_BYTES[packed[position]]
        position += 1
        if width:
            length = int.from_bytes(packed[position : position + width], "big")
            position += width
        if form <= _BYTES:
            position += length
            continue
        if form == _REFUSED:
            raise ValueError(
                f"byte {packed[position - 1]:#04x} is an extension type or unknown: use plain msgpack"
            )
        items = 2 * length if form == _MAP else length
        announced_items += items
        if announced_items > min(size, ITEMS_MAX):
            raise ValueError(f"it announces {announced_items} items in {size} bytes: send up to {ITEMS_MAX}")
        unread_items.append(items)
        if len(unread_items) > DEPTH_MAX:
            raise ValueError(f"it is nested deeper than {DEPTH_MAX - 1} levels: flatten it")
    if position != size:
        raise ValueError("it ends too early" if position > size else f"{size - position} bytes follow it")


def _reject_duplicates(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    if any(type(key) is not str for key, _ in pairs):
        raise ValueError("a key of a map is not a string: send strings as keys")
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice in a map: send each once")
    return members


def _reject_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} of {len(data)} bytes: use plain msgpack")


def _format_value(value: Any) -> str:
    if isinstance(value, (bytes, list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value!r:.60}"
