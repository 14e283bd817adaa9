"""Converts Arrow record batches of deltas to blocks by columns, without a loop over rows.

Needs pyarrow, not Spark. It checks the contents by columns, with the same rules as for any other delta.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.arrays import fill_text, flags_of, lengths_of, numbers_of, validity_of
from delta_prop_wire.block import Block
from delta_prop_wire.bounds import FLOAT_BOUND, check_metadata
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.encode import name_table
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.layout import TAG, Column
from delta_prop_wire.murmur import partitions_of
from delta_prop_wire.spec import DELTA_ID_BYTES, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = {kind_name(kind): int(kind) for kind in Kind if kind is not Kind.TRANSFORM}
"""Operations that a row can name. Transform is not among them, as a job cannot read the vector."""
_FULL, _SPARSE = np.zeros(256, bool), np.zeros(256, bool)
_FULL[[Kind.CREATE, Kind.DENSE]] = _SPARSE[[Kind.SPARSE, Kind.SPARSE_ADD]] = True
"""Masks by kind. `_FULL`: True for kinds with a full vector. `_SPARSE`: True for kinds that change elements
of a vector."""
_Columns = dict[Column, bytes | memoryview]


def to_block(rows: pa.RecordBatch, *, namespace: str | None, before: int = 0) -> Block:
    """Return rows with the columns of `columns.py` as a block.

    `namespace`: the namespace of rows that name none. If it is None, theirs is the text before the first ":"
    of the vector id, or `default` if there is no ":". `before`: the number of rows of the partition that come
    before these. Raises InvalidDelta, naming the row's vector id, the column and its bound.
    """
    names = rows.schema.names
    given = {name: rows.column(name) for name in names}
    try:
        return _build_block(given, rows.num_rows, namespace)
    except InvalidDelta as error:
        raise name_row(error, given, before) from None


def _build_block(given: dict[str, pa.Array], count: int, namespace: str | None) -> Block:
    columns: _Columns = {}
    ids = _text_column(given, "vector_id", count)
    if ids is None or ids.null_count:
        raise InvalidDelta("vector_id", "missing", row=_first_null(ids))
    columns[Column.KEY_ENDS], columns[Column.KEYS] = _ends_and_bytes(ids)
    _add_namespaces(columns, _find_namespaces(given, namespace, ids, columns[Column.KEYS]))
    kinds = _find_kinds(given, count)
    present = np.flatnonzero(np.bincount(kinds))
    if len(present) > 1:
        columns[Column.KINDS] = kinds.tobytes()
    dimension = _add_numbers(columns, given, kinds)
    _add_blobs(columns, given, count)
    _add_ids(columns, given, count)
    _add_metadata(columns, given, count)
    _add_topics(columns, given, count)
    hybrid_time = _add_times(columns, given, count)
    mask = sum(1 << int(kind) for kind in present)
    block = Block(count, columns, mask, dimension, hybrid_time)
    block.check()
    return block


def partitions_of_rows(
    rows: pa.RecordBatch, count: int, *, namespace: str | None, before: int
) -> NDArray[np.intp]:
    """Return the partition, of `count` ones, of each row's vector; the arguments are those of `to_block`.

    Raises InvalidDelta for a vector that cannot have one.
    """
    given = {name: rows.column(name) for name in rows.schema.names}
    ids = _text_column(given, "vector_id", rows.num_rows)
    if ids is None or ids.null_count or _has_longer_than(VECTOR_ID_BYTES_MAX, ids):
        to_block(rows, namespace=namespace, before=before)  # raises, and names the row
    assert ids is not None
    namespaces = _find_namespaces(given, namespace, ids, _ends_and_bytes(ids)[1])
    if isinstance(namespaces, str):
        return partitions_of(namespaces, ids.to_pylist(), count)
    if _has_longer_than(NAMESPACE_BYTES_MAX, namespaces):
        to_block(rows, namespace=namespace, before=before)
    coded = pc.dictionary_encode(namespaces)
    codes, names = numbers_of(coded.indices), coded.dictionary.to_pylist()
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes, minlength=len(names)))
    found = np.empty(rows.num_rows, np.intp)
    for name, numbers in zip(names, np.split(order, ends[:-1]), strict=True):
        found[numbers] = partitions_of(name, ids.take(pa.array(numbers)).to_pylist(), count)
    return found


def _has_longer_than(bytes_max: int, texts: pa.Array) -> bool:
    return bool(numbers_of(pc.binary_length(texts)).max() > bytes_max)


# --- names and kinds


def _text_column(given: dict[str, pa.Array], name: str, count: int) -> pa.Array | None:
    column = given.get(name)
    if column is None or column.null_count == count:
        return None
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _first_null(column: pa.Array | None) -> int:
    return 0 if column is None else int(np.argmin(validity_of(column)))


def _ends_and_bytes(column: pa.Array) -> tuple[bytes, bytes]:
    """Return ends and content of an array of texts or bytes; a null has no content."""
    start, count = column.offset, len(column)
    ends = np.frombuffer(column.buffers()[1], np.int32)[start : start + count + 1]
    if column.null_count and np.diff(ends)[~validity_of(column)].any():  # the buffer has content for a null
        return _ends_and_bytes(pc.fill_null(column, b"" if pa.types.is_binary(column.type) else ""))
    content = column.buffers()[2]
    first, last = int(ends[0]), int(ends[-1])
    text = b"" if content is None else content.slice(first, last - first).to_pybytes()
    return (ends[1:] - first).astype("<u4").tobytes(), text


def _find_namespaces(
    given: dict[str, pa.Array], namespace: str | None, ids: pa.Array, keys: bytes | memoryview
) -> str | pa.Array:
    """Return the rows' namespace: one for all, or one per row."""
    named, default = _text_column(given, "namespace", len(ids)), _default_namespaces(namespace, ids, keys)
    if named is None:
        return default
    return pc.coalesce(named, fill_text(default, len(ids)) if isinstance(default, str) else default)


def _default_namespaces(namespace: str | None, ids: pa.Array, keys: bytes | memoryview) -> str | pa.Array:
    """Return the namespace of rows that name none: one for all, or one per row."""
    if namespace is not None:
        return namespace
    if b":" not in keys:
        return DEFAULT_NAMESPACE
    prefixes = pc.replace_substring_regex(ids, pattern="(?s):.*", replacement="", max_replacements=1)
    named = flags_of(numbers_of(pc.find_substring(ids, ":")) > 0)
    return pc.if_else(named, prefixes, fill_text(DEFAULT_NAMESPACE, len(ids)))


def _add_namespaces(columns: _Columns, namespaces: str | pa.Array) -> None:
    if isinstance(namespaces, str):
        columns[Column.NAMESPACES] = name_table([namespaces])
        return
    coded = pc.dictionary_encode(namespaces)
    names = coded.dictionary.to_pylist()
    columns[Column.NAMESPACES] = name_table(names)
    if len(names) > 1:
        columns[Column.NAMESPACE_INDEX] = numbers_of(coded.indices).astype("<u2").tobytes()


def _find_kinds(given: dict[str, pa.Array], count: int) -> NDArray[np.uint8]:
    """Return each row's operation: the named one, else create for a vector, opaque for data."""
    named_ops = _text_column(given, "op", count)
    if named_ops is None or named_ops.null_count:
        has_vector, has_data = (_is_present(given, name, count) for name in ("vector", "data"))
        kinds = np.where(has_vector, Kind.CREATE, Kind.OPAQUE).astype(np.uint8)
        is_missing = ~(has_vector | has_data)
    else:
        kinds, is_missing = np.zeros(count, np.uint8), np.zeros(count, bool)
    if named_ops is not None:
        coded = pc.dictionary_encode(named_ops)
        table = np.array([_kind_of(name, coded) for name in coded.dictionary.to_pylist()], np.uint8)
        named = validity_of(named_ops)
        kinds[named] = table[numbers_of(coded.indices)[named]]
        is_missing = is_missing & ~named
    if is_missing.any():
        raise InvalidDelta(
            "op", "missing, with neither a vector nor data: name an operation", row=int(np.argmax(is_missing))
        )
    return kinds


def _kind_of(name: str, coded: pa.DictionaryArray) -> int:
    kind = KINDS.get(name)
    if kind is None:
        position = coded.dictionary.index(name).as_py()
        row = int(coded.indices.index(position).as_py())
        raise InvalidDelta("op", f"{name!r:.40} is not an operation: give one of {', '.join(KINDS)}", row=row)
    return kind


def _is_present(given: dict[str, pa.Array], name: str, count: int) -> NDArray[np.bool_]:
    column = given.get(name)
    if column is None:
        return np.zeros(count, bool)
    return validity_of(column)


# --- numbers and bytes


def _add_numbers(columns: _Columns, given: dict[str, pa.Array], kinds: NDArray[np.uint8]) -> int:
    """Add values and indices; return the common dimension of full vectors, 0 if there is none."""
    count = len(kinds)
    numbers = _numbers_of(given, count)
    if numbers is None:
        return 0
    sizes = lengths_of(numbers)
    columns[Column.VALUES] = _to_float32(numbers, sizes)
    if count > 1 and (sizes != sizes[0]).any():
        columns[Column.VALUE_ENDS] = np.cumsum(sizes).astype("<u4").tobytes()
    _add_indices(columns, given, sizes, kinds)
    if not columns[Column.VALUES]:
        del columns[Column.VALUES]
    widths = sizes[_FULL[kinds]]
    return int(widths[0]) if len(widths) and (widths == widths[0]).all() else 0


def _numbers_of(given: dict[str, pa.Array], count: int) -> pa.Array | None:
    """Return the lists of numbers in `vector` and `values`, None if there are none. Raises InvalidDelta."""
    columns = [given[name] for name in ("vector", "values") if name in given]
    columns = [column for column in columns if column.null_count < count]
    if len(columns) < 2:
        return columns[0] if columns else None
    vectors, values = columns
    has_both = validity_of(vectors) & validity_of(values)
    if has_both.any():
        raise InvalidDelta("values", "given with a vector: give one of them", row=int(np.argmax(has_both)))
    if vectors.type != values.type:
        vectors, values = (column.cast(pa.list_(pa.float32())) for column in (vectors, values))
    return pc.coalesce(vectors, values)


def _to_float32(numbers: pa.Array, sizes: NDArray[np.int64]) -> memoryview:
    flat = numbers.flatten()
    if flat.null_count:
        raise InvalidDelta("vector", "has a null in it: give all numbers", row=_row_at(flat, sizes))
    with np.errstate(over="ignore"):  # `Block.check` refuses a number that overflows to infinity
        return np.ascontiguousarray(numbers_of(flat), "<f4").view(np.uint8).data


def _add_indices(
    columns: _Columns, given: dict[str, pa.Array], sizes: NDArray[np.int64], kinds: NDArray[np.uint8]
) -> None:
    column = given.get("indices")
    count = len(kinds)
    is_sparse = _SPARSE[kinds]
    if column is None or column.null_count == count:
        lengths, flat = np.zeros(count, np.int64), np.zeros(0, np.int64)
    else:
        lengths = lengths_of(column)
        flat = column.flatten()
        if flat.null_count:
            row = _row_at(flat, lengths)
            raise InvalidDelta("indices", "has a null in it: give each value an index", row=row)
        flat = numbers_of(flat)
    wrong = lengths != np.where(is_sparse, sizes, 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InvalidDelta(
            "indices",
            f"{lengths[row]} indices for {sizes[row]} values: give a sparse operation one index per value, "
            "and other operations none",
            row=row,
        )
    if len(flat):
        if int(flat.min()) < 0 or int(flat.max()) >= 1 << 32:
            position = int(np.argmax((flat < 0) | (flat >= 1 << 32)))
            row = int(np.searchsorted(np.cumsum(lengths), position, "right"))
            raise InvalidDelta("indices", f"{flat[position]} is not an index: count from 0", row=row)
        columns[Column.INDICES] = flat.astype("<u4").tobytes()


def _row_at(flat: pa.Array, sizes: NDArray[np.int64]) -> int:
    """Return the row of the first null in a flattened column."""
    return int(np.searchsorted(np.cumsum(sizes), _first_null(flat), "right"))


def _add_blobs(columns: _Columns, given: dict[str, pa.Array], count: int) -> None:
    column = given.get("data")
    if column is None or column.null_count == count:
        return
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    ends, content = _ends_and_bytes(column)
    if content:
        columns[Column.BLOB_ENDS], columns[Column.BLOBS] = ends, content


# --- optional columns


def _add_ids(columns: _Columns, given: dict[str, pa.Array], count: int) -> None:
    column = given.get("id")
    if column is None or column.null_count == count:
        return
    if column.null_count:
        raise InvalidDelta(
            "id", "missing, while other rows have one: give all an id or none", row=_first_null(column)
        )
    lengths = numbers_of(pc.binary_length(column))
    if (lengths != DELTA_ID_BYTES).any():
        row = int(np.argmax(lengths != DELTA_ID_BYTES))
        raise InvalidDelta("id", f"{lengths[row]} bytes: give an id of {DELTA_ID_BYTES}", row=row)
    columns[Column.IDS] = _ends_and_bytes(column.cast(pa.binary()))[1]


def _add_metadata(columns: _Columns, given: dict[str, pa.Array], count: int) -> None:
    column = _text_column(given, "metadata", count)
    if column is None:
        return
    packed = [
        b"" if text is None else _pack_metadata(text, row) for row, text in enumerate(column.to_pylist())
    ]
    columns[Column.METADATA] = b"".join(packed)
    columns[Column.METADATA_ENDS] = np.cumsum([len(one) for one in packed]).astype("<u4").tobytes()


def _pack_metadata(text: str, row: int) -> bytes:
    try:
        patch = json.loads(text)
        check_metadata(patch)
    except InvalidDelta as error:
        raise InvalidDelta("metadata", error.reason, row=row) from None
    except ValueError as error:
        raise InvalidDelta("metadata", f"{text!r:.60} is not JSON: {error}", row=row) from None
    return bytes(msgpack.packb(patch))


def _add_topics(columns: _Columns, given: dict[str, pa.Array], count: int) -> None:
    column = given.get("topics")
    if column is None or column.null_count == count:
        return
    names: dict[str, int] = {}
    tags: list[bytes] = []
    for row, topics in enumerate(column.to_pylist()):
        for topic in topics or ():
            if topic is None:
                raise InvalidDelta("topics", "has a null in it: leave the null out", row=row)
            tags.append(TAG.pack(row, names.setdefault(topic, len(names))))
    if tags:
        columns[Column.TAG_NAMES], columns[Column.TAGS] = name_table(names), b"".join(tags)


def _add_times(columns: _Columns, given: dict[str, pa.Array], count: int) -> int:
    """Add the rows' times; return the one that all share, else 0."""
    column = given.get("timestamp")
    if column is None or column.null_count == count:
        return 0
    ms = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    times = np.where(validity_of(ms), numbers_of(ms), 0)
    if int(times.min()) < 0:
        raise InvalidDelta("timestamp", "before 1970: give a later time", row=int(np.argmin(times)))
    hybrid = times.astype("<u8") << np.uint64(16)
    if (hybrid == hybrid[0]).all():
        return int(hybrid[0])
    columns[Column.TIMES] = hybrid.tobytes()
    return 0


# --- the name of an invalid row, which alone is read again

_ID_CHARS_MAX = 100
_NUMBER_FIELDS = ("vector", "values", "factor", "amount")


def name_row(error: InvalidDelta, given: dict[str, pa.Array], before: int) -> InvalidDelta:
    """Return the error with the row's vector id, as the row's number in a block means nothing to a user.

    `before`: the number of rows of the partition that come before these.
    """
    field, row, ids = error.field or "delta", error.row, given.get("vector_id")
    if row is None or ids is None:
        return error
    if field == "vector_id" and not ids[row].is_valid:
        return InvalidDelta(field, _locate_row(ids, row, before))
    reason = (field in _NUMBER_FIELDS and _overflow_reason(given, row)) or error.reason
    return InvalidDelta(field, f"of vector_id {ids[row].as_py()!r:.{_ID_CHARS_MAX}}: {reason}")


def _locate_row(ids: pa.Array, row: int, before: int) -> str:
    near = ""
    for other, where in ((row - 1, "after"), (row + 1, "before")):
        if 0 <= other < len(ids) and ids[other].is_valid:
            near = f", {where} vector_id {ids[other].as_py()!r:.{_ID_CHARS_MAX}}"
            break
    return (
        f"missing in row {before + row:,} of its partition, counted from 0{near}: show such rows with "
        'df.where("vector_id is null"), leave them out with df.where("vector_id is not null")'
    )


def _overflow_reason(given: dict[str, pa.Array], row: int) -> str | None:
    """Return the reason for a finite double that overflows float32, None if there is none."""
    for name in ("vector", "values"):
        column = given.get(name)
        numbers = None if column is None else column[row].as_py()
        for position, number in enumerate(numbers or ()):
            with np.errstate(over="ignore"):
                fits = number is None or np.isfinite(np.float32(number)) or not np.isfinite(number)
            if not fits:
                return (
                    f"number {position} is {number!r}, which does not fit in float32: numbers are finite and "
                    f"within {FLOAT_BOUND}: clamp it or leave it out"
                )
    return None
