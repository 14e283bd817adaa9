"""Templates of one-row bodies: a check of one body holds for all others with the same template.

Pure. A template covers header, directory and lengths. Of the next body only checksum, names and numbers are
checked here; if any of them may be invalid, `body_checks.py` and `validate.py` check the body and raise the
error.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from delta_prop_wire.batch import Batch, directory_layout
from delta_prop_wire.bounds import name_is_valid
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Priority
from delta_prop_wire.encode import encode_columns
from delta_prop_wire.fast.homogeneous import homogeneous_is_valid
from delta_prop_wire.layout import Column, read_single_name
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    COUNTER_MAX,
    CRC_BYTES,
    DIMENSION_MAX,
    HEADER_BYTES,
    NAMESPACE_BYTES_MAX,
    STAMP_BYTES,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

TEMPLATES_MAX = 1024
"""At this many templates their table is cleared; frequent templates are soon learned again."""
BODY_BYTES_MAX = 8192
INDICES_MAX = 64
"""Above this many bytes or indices the general code is almost as fast."""
_HEAD = struct.Struct("<4sIQI4xQ8x56s")
"""Version and attributes, row count, origin, epoch, base counter; row description from `_CONTENT_AT` on."""
_HEAD_BYTES = _HEAD.size
_RESIDUE = 0x48674BC7
"""The CRC32C of any bytes that end with their own CRC32C."""
_BASE_MAX = COUNTER_MAX - 1
_EPOCH = 1
"""The epoch of the batches that a service encodes itself."""
_CONTENT_AT = 40
"""Offset in a body of the part that describes its row."""
_FRAME_BYTES = HEADER_BYTES + STAMP_BYTES
_TEXTS = (Column.KEYS, Column.NAMESPACES)
_NUMBER_BYTES, _TOP_BYTE = 4, 3
_INFINITE, _MINUS_INFINITE = 0x7F, 0xFF
"""The highest byte of a float32 that is not finite, and of some large finite numbers."""

_templates: dict[tuple[int, bytes, bytes], _RowTemplate | None] = {}
"""Templates by length, first four bytes and row description; None after the first body with that key."""
_encode_templates: dict[tuple[int, str, int, int, int], _EncodeTemplate] = {}
"""Templates by kind (as a bit), namespace, number of values, ack level with priority, and length of the
vector id."""


def parse_with_template(body: bytes | memoryview) -> Batch | None:
    """Parse and validate a body that has a template.

    Return None if it has none or may be invalid; `parse_batch` and `validate_batch` then check it.
    """
    size = len(body)
    if not _HEAD_BYTES <= size <= BODY_BYTES_MAX or type(body) is not bytes:
        return None
    prefix, count, origin, epoch, base, rest = _read_head(body)
    if count != 1:
        return None
    template = _templates.get((size, prefix, rest))
    if template is None or crc32c(body) != _RESIDUE or not 0 < base <= _BASE_MAX:
        return None
    key_end, name, namespace, *numbers, padding = template.unpack_columns(body, template.columns_at)
    key, namespace_names, top_bytes = (
        name.decode("latin-1"),
        _valid_namespace(namespace),
        body[template.top_bytes],
    )
    highest = -1
    if template.is_sparse:
        highest = max(numbers)
    elif numbers and numbers[0] != template.blob_size:
        return None
    if (
        padding
        or namespace_names is None
        or key_end != len(name)
        or not (key.isascii() and key.isprintable())
        or _INFINITE in top_bytes
        or _MINUS_INFINITE in top_bytes
        or highest >= DIMENSION_MAX
    ):
        return None
    batch = template.make_batch(body, key, namespace_names)
    batch.origin, batch.epoch, batch.base, batch.last = origin, epoch, base, base
    batch.highest_index = highest
    return batch


def encode_row(
    key: bytes,
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
    """Encode one row, whose key is printable ASCII, to the same bytes as `encode_columns`.

    With a template it is encoded in a few steps and known to be valid, unless its numbers look invalid.
    """
    # The key holds plain numbers, since the hash of an enumeration's members is a Python function.
    template_key = 1 << kind, namespace, width, ack_level << ACK_LEVEL_SHIFT | priority, len(key)
    template = _encode_templates.get(template_key)
    numbers, index_bytes = bytes(values), b"" if indices is None else bytes(indices)
    name = key.decode("ascii")
    highest = max(template.unpack_indices(index_bytes)) if template is not None and template.is_sparse else -1
    top_bytes = numbers[_TOP_BYTE::_NUMBER_BYTES]
    if template is None or highest >= DIMENSION_MAX or _INFINITE in top_bytes or _MINUS_INFINITE in top_bytes:
        batch = encode_columns(
            [name], [numbers], None if indices is None else [index_bytes],
            width=width, namespace=namespace, kind=kind, origin=origin, base=base,
            ack_level=ack_level, priority=priority, hybrid_time=hybrid_time,
        )  # fmt: skip
        if template is None and _can_be_template(batch) and homogeneous_is_valid(batch):
            if len(_encode_templates) >= TEMPLATES_MAX:
                _encode_templates.clear()
            _encode_templates[template_key] = _EncodeTemplate(batch)
        return batch
    prefix, rest, namespace_table = template.fixed_parts
    columns = (numbers,) if indices is None else (index_bytes, numbers)
    content = template.pack(
        prefix, 1, origin, _EPOCH, base, hybrid_time, rest, len(key), key, namespace_table, *columns
    )
    crc = crc32c(content)
    batch = template.make_batch(content + crc.to_bytes(CRC_BYTES, "little"), name, template.namespace_names)
    batch.origin, batch.epoch, batch.base, batch.last = origin, _EPOCH, base, base
    batch.highest_index, batch.crc = highest, crc
    return batch


def learn_template(batch: Batch) -> None:
    """Store the template of a decoded batch, if it can have one and is the second with its template key."""
    if not _can_be_template(batch):
        return
    body = batch.raw
    prefix, _, _, _, _, rest = _read_head(body)
    template_key = len(body), prefix, rest
    if template_key in _templates:
        if homogeneous_is_valid(batch):
            _templates[template_key] = _RowTemplate(batch)
        return
    if len(_templates) >= TEMPLATES_MAX:
        _templates.clear()
    _templates[template_key] = None


def _can_be_template(batch: Batch) -> bool:
    return (
        batch.count == 1
        and type(batch.raw) is bytes
        and len(batch.raw) <= BODY_BYTES_MAX
        and len(batch.indices) <= INDICES_MAX
    )


class _RowTemplate:
    """The layout of the bodies with one template key, and the fields that they share."""

    __slots__ = ("blob_size", "columns_at", "is_sparse", "shared_fields", "top_bytes", "unpack_columns")

    def __init__(self, batch: Batch) -> None:
        """Derive the template from a homogeneous, valid batch of one row."""
        bounds = batch._column_bounds
        bounds_at, _, self.columns_at = directory_layout(batch.columns_mask)
        self.shared_fields = (
            batch.attributes, batch.kinds_mask, batch.dimension, batch.length, batch.columns_mask,
            batch.kind, batch.ack_level, batch.priority, batch.values_per_row, bounds,
        )  # fmt: skip
        self.is_sparse = len(batch.indices) > 0
        self.blob_size, self.top_bytes = 0, slice(0)
        layout, position = "<", self.columns_at
        for column, index in bounds_at.items():
            start, stop = bounds[index : index + 2]
            size = stop - start
            if column == Column.VALUES:
                self.top_bytes = slice(start + _TOP_BYTE, stop, _NUMBER_BYTES)
            elif column == Column.BLOBS:
                self.blob_size = size
            else:
                field_format = f"{size}s" if column in _TEXTS else f"{size // _NUMBER_BYTES}I"
                layout, position = f"{layout}{start - position}x{field_format}", stop
        self.unpack_columns = struct.Struct(f"{layout}{batch.length - position}xI").unpack_from

    def make_batch(self, body: bytes, key: str, namespace_names: tuple[str, ...]) -> Batch:
        """Return the batch of a body; the caller sets its epoch, its dot and its highest index."""
        batch = _new_object(Batch)
        batch.raw, batch.size, batch.count = body, _FRAME_BYTES + len(body), 1
        batch.namespace_names, batch.namespace, batch.keys = namespace_names, namespace_names[0], [key]
        (
            batch.attributes, batch.kinds_mask, batch.dimension, batch.length, batch.columns_mask,
            batch.kind, batch.ack_level, batch.priority, batch.values_per_row, batch._column_bounds,
        ) = self.shared_fields  # fmt: skip
        batch.is_control = batch.has_gaps = False
        batch.homogeneous = batch.decoded = batch.validated = True
        return batch


class _EncodeTemplate(_RowTemplate):
    """A template that can also write bodies."""

    __slots__ = ("fixed_parts", "namespace_names", "pack", "unpack_indices")

    def __init__(self, batch: Batch) -> None:
        """Derive the template from a batch that `encode_columns` made."""
        super().__init__(batch)
        raw, position = batch.raw, self.columns_at
        self.namespace_names = batch.namespace_names
        namespace_table, layout = b"", f"<4sIQI4xQQ{position - _CONTENT_AT}s"
        for column, index in directory_layout(batch.columns_mask)[0].items():
            start, stop = batch._column_bounds[index : index + 2]
            if column == Column.NAMESPACES:
                namespace_table = bytes(raw[start:stop])
            field_format = "I" if column == Column.KEY_ENDS else f"{stop - start}s"
            layout, position = f"{layout}{start - position}x{field_format}", stop
        self.fixed_parts = bytes(raw[:4]), bytes(raw[_CONTENT_AT : self.columns_at]), namespace_table
        self.unpack_indices = struct.Struct(f"<{len(batch.indices)}I").unpack
        self.pack = struct.Struct(f"{layout}{len(raw) - CRC_BYTES - position}x").pack


_new_object, _read_head = object.__new__, _HEAD.unpack_from


@lru_cache(maxsize=TEMPLATES_MAX)
def _valid_namespace(raw: bytes) -> tuple[str, ...] | None:
    """Return the namespace in a table of names, as a tuple; None unless it is the only one and valid."""
    names = read_single_name(raw)
    return names if names is not None and name_is_valid(names[0], NAMESPACE_BYTES_MAX) else None
