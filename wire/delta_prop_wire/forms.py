"""Bodies of one row whose form is known: what was found out about one holds for all others of that form.

Pure. A form is all that header, directory and lengths say. What is left to look at in the next body are its
checksum, its names and its numbers; where anything about them is in doubt it is left to `soundness.py` and
`validate.py`, which say what is wrong with it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from delta_prop_wire.batch import Batch, directory_of
from delta_prop_wire.bounds import name_is_sound
from delta_prop_wire.crc import crc32c
from delta_prop_wire.encode import encode_columns
from delta_prop_wire.layout import Column
from delta_prop_wire.plain import name_in
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    COUNTER_MAX,
    CRC_BYTES,
    DIMENSION_MAX,
    HEADER_BYTES,
    NAMESPACE_BYTES_MAX,
    STAMP_BYTES,
)
from delta_prop_wire.validate import plain_is_sound

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_wire.delta import AckLevel, Priority

FORMS_MAX = 1024
"""When so many are known, or were met once, all are forgotten: those that matter come again."""
BODY_BYTES_MAX = 8192
INDICES_MAX = 64
"""Beyond so many bytes, or indices, the general way takes hardly longer."""
_HEAD = struct.Struct("<4sIQI4xQ8x56s")
"""Version and attributes, rows, origin, epoch, base counter; what the row is, columns and lengths."""
_HEAD_BYTES = _HEAD.size
_RESIDUE = 0x48674BC7
"""CRC32C of anything that ends with its own CRC32C."""
_BASE_MAX = COUNTER_MAX - 1
_EPOCH = 1
"""Of what a service encodes itself."""
_REST_AT = 40
"""Where in a body it begins to say what its row is."""
_FRAME_BYTES = HEADER_BYTES + STAMP_BYTES
_TEXTS = (Column.KEYS, Column.NAMESPACES)
_NUMBER_BYTES, _TOP = 4, 3
_INFINITE, _MINUS_INFINITE = 0x7F, 0xFF
"""The highest byte of a float32 that is not finite; and of some of the greatest that are."""

_forms: dict[tuple[int, bytes, bytes], _Form | None] = {}
"""By length and what the header and the directory say of the row; None for what was met once."""
_encoded: dict[tuple[int, str, int, int, int], _RowForm] = {}
"""By kind, namespace, numbers, level with lane, and bytes of the vector id."""


def parse_known(body: bytes | memoryview) -> Batch | None:
    """`parse_batch` and `validate_batch` of a body whose form is known; None where they have to be asked."""
    size = len(body)
    if not _HEAD_BYTES <= size <= BODY_BYTES_MAX or type(body) is not bytes:
        return None
    words, count, origin, epoch, base, rest = _read_head(body)
    if count != 1:
        return None
    form = _forms.get((size, words, rest))
    if form is None or crc32c(body) != _RESIDUE or not 0 < base <= _BASE_MAX:
        return None
    end, name, namespace, *numbers, padding = form.read(body, form.at)
    key, named, tops = name.decode("latin-1"), _sound_name(namespace), body[form.tops]
    highest = -1
    if form.is_sparse:
        highest = max(numbers)
    elif numbers and numbers[0] != form.bytes_end:
        return None
    if (
        padding
        or named is None
        or end != len(name)
        or not (key.isascii() and key.isprintable())
        or _INFINITE in tops
        or _MINUS_INFINITE in tops
        or highest >= DIMENSION_MAX
    ):
        return None
    batch = form.batch(body, key, named)
    batch.origin, batch.epoch, batch.base, batch.last = origin, epoch, base, base
    batch.index_highest = highest
    return batch


def encode_row(
    name: bytes,
    values: Buffer,
    indices: Buffer | None,
    *,
    width: int,
    namespace: str,
    kind: int,
    origin: int,
    base: int,
    ack_level: AckLevel,
    priority: Priority,
    hybrid_time: int,
) -> Batch:
    """`encode_columns` of one row, whose vector id is printable ASCII, to the same bytes.

    Where a row of that form came before it is encoded in a few steps and known to be sound; not where its
    numbers are in doubt.
    """
    # Numbers, not members of an enumeration, whose hash is a function of Python.
    known = 1 << kind, namespace, width, ack_level << ACK_LEVEL_SHIFT | priority, len(name)
    form = _encoded.get(known)
    numbers, places, key = bytes(values), b"" if indices is None else bytes(indices), name.decode("ascii")
    highest = max(form.places(places)) if form is not None and form.is_sparse else -1
    tops = numbers[_TOP::_NUMBER_BYTES]
    if form is None or highest >= DIMENSION_MAX or _INFINITE in tops or _MINUS_INFINITE in tops:
        batch = encode_columns(
            [key], [numbers], None if indices is None else [places],
            width=width, namespace=namespace, kind=kind, origin=origin, base=base,
            ack_level=ack_level, priority=priority, hybrid_time=hybrid_time,
        )  # fmt: skip
        if form is None and _may_be_known(batch) and plain_is_sound(batch):
            if len(_encoded) >= FORMS_MAX:
                _encoded.clear()
            _encoded[known] = _RowForm(batch)
        return batch
    words, rest, names = form.same
    columns = (numbers,) if indices is None else (places, numbers)
    signed = form.pack(words, 1, origin, _EPOCH, base, hybrid_time, rest, len(name), name, names, *columns)
    crc = crc32c(signed)
    batch = form.batch(signed + crc.to_bytes(CRC_BYTES, "little"), key, form.named)
    batch.origin, batch.epoch, batch.base, batch.last = origin, _EPOCH, base, base
    batch.index_highest, batch.crc = highest, crc
    return batch


def note_form(batch: Batch) -> None:
    """Know the form of a batch that was decoded, the second time that it comes, where such are looked for."""
    if not _may_be_known(batch):
        return
    body = batch.raw
    words, _, _, _, _, rest = _read_head(body)
    known = len(body), words, rest
    if known in _forms:
        if plain_is_sound(batch):
            _forms[known] = _Form(batch)
        return
    if len(_forms) >= FORMS_MAX:
        _forms.clear()
    _forms[known] = None


def _may_be_known(batch: Batch) -> bool:
    return (
        batch.count == 1
        and type(batch.raw) is bytes
        and len(batch.raw) <= BODY_BYTES_MAX
        and len(batch.indices) <= INDICES_MAX
    )


class _Form:
    """Where things are in each body of a form, and what is the same in all of them."""

    __slots__ = ("at", "bytes_end", "is_sparse", "read", "told", "tops")

    def __init__(self, batch: Batch) -> None:
        """Of a batch that is plain and sound, of one row."""
        bounds = batch._bounds_of
        places, _, self.at = directory_of(batch.columns_mask)
        self.told = (
            batch.attributes, batch.kinds_mask, batch.dimension, batch.length, batch.columns_mask,
            batch.kind, batch.ack_level, batch.priority, batch.row_values, bounds,
        )  # fmt: skip
        self.is_sparse = len(batch.indices) > 0
        self.bytes_end, self.tops = 0, slice(0)
        layout, at = "<", self.at
        for column, place in places.items():
            start, stop = bounds[place : place + 2]
            size = stop - start
            if column == Column.VALUES:
                self.tops = slice(start + _TOP, stop, _NUMBER_BYTES)
            elif column == Column.BLOBS:
                self.bytes_end = size
            else:
                read = f"{size}s" if column in _TEXTS else f"{size // _NUMBER_BYTES}I"
                layout, at = f"{layout}{start - at}x{read}", stop
        self.read = struct.Struct(f"{layout}{batch.length - at}xI").unpack_from

    def batch(self, body: bytes, key: str, named: tuple[str, ...]) -> Batch:
        """The batch of such a body, to which its dot and its highest index are to be added."""
        batch = _new(Batch)
        batch.raw, batch.size, batch.count = body, _FRAME_BYTES + len(body), 1
        batch.namespace_names, batch.namespace, batch.keys = named, named[0], [key]
        (
            batch.attributes, batch.kinds_mask, batch.dimension, batch.length, batch.columns_mask,
            batch.kind, batch.ack_level, batch.priority, batch.row_values, batch._bounds_of,
        ) = self.told  # fmt: skip
        batch.is_control = batch.leaps = False
        batch.plain = batch.decoded = batch.sound = True
        return batch


class _RowForm(_Form):
    """How to write a body of a form, besides."""

    __slots__ = ("named", "pack", "places", "same")

    def __init__(self, batch: Batch) -> None:
        """Of a batch as `encode_columns` made it."""
        super().__init__(batch)
        raw, at = batch.raw, self.at
        self.named = batch.namespace_names
        names, layout = b"", f"<4sIQI4xQQ{at - _REST_AT}s"
        for column, place in directory_of(batch.columns_mask)[0].items():
            start, stop = batch._bounds_of[place : place + 2]
            if column == Column.NAMESPACES:
                names = bytes(raw[start:stop])
            written = "I" if column == Column.KEY_ENDS else f"{stop - start}s"
            layout, at = f"{layout}{start - at}x{written}", stop
        self.same = bytes(raw[:4]), bytes(raw[_REST_AT : self.at]), names
        self.places = struct.Struct(f"<{len(batch.indices)}I").unpack
        self.pack = struct.Struct(f"{layout}{len(raw) - CRC_BYTES - at}x").pack


_new, _read_head = object.__new__, _HEAD.unpack_from


@lru_cache(maxsize=FORMS_MAX)
def _sound_name(raw: bytes) -> tuple[str] | None:
    """The one namespace in a table of such, None unless it is sound."""
    named = name_in(raw)
    return named if named is not None and name_is_sound(named[0], NAMESPACE_BYTES_MAX) else None
