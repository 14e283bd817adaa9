"""The image: resident vectors as columns in one file, so that a start need not read them row by row.

The storage file stays authoritative: it names the matching image, and the commit after which its own rows
override the image's. The image consists of blocks of rows, each with a checksum; a torn, corrupted or foreign
image is rejected entirely. Numbers are little-endian. Every function that uses the file blocks, so call it on
a thread.

Rows may change while they are written. So the storage file names an image only with a commit that contains
every row that changed meanwhile.
"""

from __future__ import annotations

import glob
import json
import os
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.vector_table import (
    LAMPORT,
    NO_LAMPORT,
    NO_OFFSET,
    OFFSET,
    OTHER_DIMENSION,
    STALE,
    VECTOR,
    VectorTable,
)
from delta_prop_wire.crc import crc32c

MAGIC = b"dpimage1"
_BLOCK = struct.Struct("<IQI")
"""What a block begins with: the header's length, the length of all sections, the checksum."""
_BLOCK_ROWS = 65_536
_BLOCK_BYTES = 8 << 20
_SYNC_BYTES = 64 << 20
"""Maximum bytes per sync: a larger sync would delay a log on the same disk."""


class ImageError(Exception):
    """The image cannot be used or written; the message names the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some rows of one namespace, as columns.

    `extras`: by row, its bytes, its metadata and its number of deltas without effect.
    """

    namespace: str
    dimension: int | None
    keys: list[str]
    heads: NDArray[np.int64]
    forms: NDArray[np.uint8]
    vectors: NDArray[np.float32] | None
    extras: dict[int, tuple[bytes | None, dict[str, Any] | None, int]] = field(default_factory=dict)

    def fit_to(self, dimension: int | None) -> Block:
        """Return the same rows for a table of that dimension, which is None if it is not fixed yet."""
        vectors = self.vectors
        other_rows = (self.forms == OTHER_DIMENSION).nonzero()[0].tolist()
        if dimension is None or dimension == self.dimension or (vectors is None and not other_rows):
            return self
        forms, extras = self.forms.copy(), dict(self.extras)
        fitted = np.zeros((len(self.keys), dimension), np.float32)
        for row in other_rows:
            data, metadata, ignored = extras[row]
            if data is not None and len(data) == 4 * dimension:
                fitted[row] = np.frombuffer(data, "<f4")
                forms[row], extras[row] = VECTOR, (None, metadata, ignored)
        if vectors is not None:
            for row in (self.forms == VECTOR).nonzero()[0].tolist():
                _, metadata, ignored = extras.get(row, (None, None, 0))
                forms[row] = OTHER_DIMENSION
                extras[row] = (vectors[row].astype("<f4", copy=False).tobytes(), metadata, ignored)
        return replace(self, dimension=dimension, forms=forms, vectors=fitted, extras=extras)


class TableColumns:
    """A view of one table at the time of creation; its rows are read later, when they may have changed."""

    def __init__(self, table: VectorTable) -> None:
        self.namespace, self.dimension = table.namespace, table.dimension
        self.used = table.used
        self._table, self._releases = table, table.releases
        # A table that grows allocates larger columns; these columns keep their size.
        self._heads, self._forms, self._matrix = table.heads, table.forms, table.matrix

    def blocks(self) -> Iterator[Block]:
        """Yield the rows in use. Raises ImageError if slots were released meanwhile."""
        block_rows = max(min(_BLOCK_ROWS, _BLOCK_BYTES // (4 * (self.dimension or 0) + 64)), 1)
        for start in range(0, self.used, block_rows):
            yield self._block(start, min(start + block_rows, self.used))

    def _block(self, start: int, end: int) -> Block:
        table = self._table
        heads = self._heads[start:end].copy()
        keys = table.slots.ids(start, end)
        live = heads[:, LAMPORT] != NO_LAMPORT
        extras = {}
        if table.extra_bytes_by_slot or table.ignored:
            for row in live.nonzero()[0].tolist():
                slot = start + row
                extra = (table.data.get(slot), table.metadata.get(slot), table.ignored.get(slot, 0))
                if extra != (None, None, 0):
                    extras[row] = extra
        forms = self._forms[start:end].copy()
        vectors = None if self._matrix is None else self._matrix[start:end].copy()
        if vectors is not None:
            vectors[forms != VECTOR] = 0  # their rows of the matrix still have numbers of deleted vectors
        if table.releases != self._releases:
            raise ImageError(f"a vector of namespace {self.namespace!r} was evicted or removed meanwhile")
        if not live.all():
            live_rows = live.nonzero()[0]
            new_row = {row: new for new, row in enumerate(live_rows.tolist())}
            extras = {new_row[row]: extra for row, extra in extras.items()}
            keys = [keys[row] for row in live_rows.tolist()]
            heads, forms, vectors = (
                heads[live_rows],
                forms[live_rows],
                None if vectors is None else vectors[live_rows],
            )
        return Block(self.namespace, self.dimension, keys, heads, forms, vectors, extras)  # type: ignore[arg-type]


def new_image_name() -> bytes:
    """Return 16 random bytes as a unique name."""
    return os.urandom(16)


def image_path(storage_path: Path, image: bytes) -> Path:
    """Return the path of an image of a storage file."""
    return storage_path.with_name(f"{storage_path.name}-image-{image.hex()[:16]}")


def remove_all_images(storage_path: Path) -> None:
    """Remove all images of a storage file, durably. Raises OSError."""
    for path in storage_path.parent.glob(f"{glob.escape(storage_path.name)}-image-*"):
        path.unlink()
    sync_folder(storage_path.parent)


def remove_images(storage_path: Path, keep: bytes | None) -> None:
    """Remove the images of a storage file, except `keep`, as far as the system permits."""
    name_to_keep = None if keep is None else image_path(storage_path, keep).name
    for path in storage_path.parent.glob(f"{glob.escape(storage_path.name)}-image-*"):
        if path.name != name_to_keep:
            with suppress(OSError):
                path.unlink()


def write_image(path: Path, image: bytes, log_id: bytes, tables: Sequence[TableColumns]) -> Generator[int]:
    """Write an image, one block per step; each step yields the number of rows so far.

    After the last step the image is durable. `image`: its unique name. `log_id`: the log of its offsets.
    Raises ImageError; then, or if the caller stops early, no file remains.
    """
    rows = 0
    try:
        with open(path, "wb") as file:
            sizes = [[columns.namespace, columns.dimension, columns.used] for columns in tables]
            file.write(MAGIC)
            unsynced = _write_block(file, {"image": image.hex(), "log_id": log_id.hex(), "tables": sizes}, [])
            for columns in tables:
                for block in columns.blocks():
                    unsynced += _write_block(file, *_encode(block))
                    if unsynced > _SYNC_BYTES:
                        _sync(file)
                        unsynced = 0
                    rows += len(block.keys)
                    yield rows
            _write_block(file, {"rows": rows}, [])
            _sync(file)
        sync_folder(path.parent)
    except BaseException as failure:
        with suppress(OSError):
            path.unlink()
        if isinstance(failure, OSError):
            raise ImageError(f"{path} cannot be written: {failure}") from failure
        raise


def _encode(block: Block) -> tuple[dict[str, object], list[bytes]]:
    text = "\0".join(block.keys)
    is_joined = text.count("\0") == len(block.keys) - 1
    data = b"".join(extra[0] or b"" for extra in block.extras.values())
    extras = [
        [row, None if content is None else len(content), metadata, ignored]
        for row, (content, metadata, ignored) in block.extras.items()
    ]
    sections = [
        text.encode() if is_joined else json.dumps(block.keys).encode(),
        np.array([crc32c(key.encode()) for key in block.keys], "<u4").tobytes(),
        block.heads.astype("<i8", copy=False).tobytes(),
        block.forms.tobytes(),
        b"" if block.vectors is None else block.vectors.astype("<f4", copy=False).tobytes(),
        json.dumps(extras, ensure_ascii=False).encode() if extras else b"",
        data,
    ]
    header: dict[str, object] = {
        "namespace": block.namespace,
        "dimension": None if block.vectors is None else block.dimension,
        "rows": len(block.keys),
        "plain": is_joined,
        "sections": [len(section) for section in sections],
    }
    return header, sections


def _write_block(file: BinaryIO, header: dict[str, object], sections: Sequence[bytes]) -> int:
    text = json.dumps(header).encode()
    checksum = crc32c(text)
    for section in sections:
        checksum = crc32c(section, checksum)
    size = sum(map(len, sections))
    file.write(_BLOCK.pack(len(text), size, checksum))
    file.write(text)
    for section in sections:
        file.write(section)
    return size


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    if hasattr(os, "O_DIRECTORY"):  # other systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ImageLoader:
    """Loads an image into separate tables, which are valid only once all of it was read."""

    def __init__(self, path: Path, image: bytes, log_id: bytes) -> None:
        self.tables: dict[str, VectorTable] = {}
        self.lamport = 0
        self._path, self._image, self._log_id = path, image, log_id

    def steps(self) -> Generator[int]:
        """Read one block per step; each step yields the number of rows so far. Raises ImageError."""
        rows, is_complete, same_log = 0, False, True
        try:
            with open(self._path, "rb") as file:
                bytes_left = os.fstat(file.fileno()).st_size - len(MAGIC)
                if file.read(len(MAGIC)) != MAGIC:
                    raise ImageError("it is not an image of this version")
                header, _, bytes_left = _read_block(file, bytes_left)
                if header["image"] != self._image.hex():
                    raise ImageError("it is not the image that the storage file names")
                same_log = header["log_id"] == self._log_id.hex()
                for namespace, dimension, slots in header["tables"]:
                    table = self.tables[namespace] = VectorTable(namespace)
                    if dimension:
                        table.fix_dimension(dimension)
                    table.ensure_capacity(min(slots, bytes_left))  # a row takes at least one byte
                while not is_complete:
                    header, content, bytes_left = _read_block(file, bytes_left)
                    is_complete = "namespace" not in header
                    if not is_complete:
                        rows += self._load_block(_decode(header, content), same_log=same_log)
                        yield rows
                if header["rows"] != rows or bytes_left:
                    raise ImageError(
                        f"its end says {header['rows']} rows and it holds {rows}, "
                        f"with {bytes_left} more bytes"
                    )
        except FileNotFoundError as failure:
            raise ImageError("it does not exist") from failure
        except (OSError, KeyError, ValueError, TypeError, IndexError, struct.error) as failure:
            raise ImageError(f"it cannot be read: {failure!r}") from failure

    def override(self, block: Block) -> None:
        """Replace rows by later versions from the storage file."""
        if block.namespace not in self.tables:
            self.tables[block.namespace] = VectorTable(block.namespace)
        table = self.tables[block.namespace]
        put_block(table, block)
        self.lamport = max(self.lamport, int(block.heads[:, LAMPORT].max()))

    def _load_block(self, block: Block, *, same_log: bool) -> int:
        table = self.tables[block.namespace]
        heads = block.heads
        if not same_log:
            heads = heads.copy()
            heads[:, OFFSET] = NO_OFFSET
        if len(heads):
            self.lamport = max(self.lamport, int(heads[:, LAMPORT].max()))
        added = table.extend(block.keys, heads, block.forms, block.vectors)
        for row, extra in block.extras.items():
            _set_extra(table, int(added[row]), *extra)
        return len(block.keys)


def put_block(table: VectorTable, block: Block) -> None:
    """Set new or existing vectors to the rows of a block."""
    block = block.fit_to(table.dimension)
    if block.vectors is not None and table.dimension is None:
        table.fix_dimension(block.vectors.shape[1])
    slots = table.slots_of(block.keys)
    if table.extra_bytes_by_slot or table.ignored:
        for slot in slots.tolist():
            table.set_extra(slot, None, None)
            table.ignored.pop(slot, None)
    if block.vectors is not None and table.matrix is not None:
        table.matrix[slots] = block.vectors
    table.heads[slots] = block.heads
    table.forms[slots] = block.forms
    table.flags[slots] = STALE
    for row, extra in block.extras.items():
        _set_extra(table, int(slots[row]), *extra)


def _set_extra(
    table: VectorTable, slot: int, data: bytes | None, metadata: dict[str, Any] | None, ignored: int
) -> None:
    table.set_extra(slot, data, metadata)
    if ignored:
        table.ignored[slot] = ignored


def add_block(table: VectorTable, block: Block) -> None:
    """Add the vectors of a block that have no slot yet."""
    block = block.fit_to(table.dimension)
    rows = [row for row, key in enumerate(block.keys) if key not in table.slots]
    if not rows:
        return
    chosen = slice(None) if len(rows) == len(block.keys) else rows
    keys = block.keys if len(rows) == len(block.keys) else [block.keys[row] for row in rows]
    vectors = None if block.vectors is None else block.vectors[chosen]
    added = table.extend(keys, block.heads[chosen], block.forms[chosen], vectors)
    for row, slot in zip(rows, added.tolist(), strict=True):
        if row in block.extras:
            _set_extra(table, slot, *block.extras[row])


def _read_block(file: BinaryIO, bytes_left: int) -> tuple[dict[str, Any], memoryview, int]:
    """Return the next block's header and sections, and the number of bytes left after them."""
    length, size, checksum = _BLOCK.unpack(file.read(_BLOCK.size))
    bytes_left -= _BLOCK.size + length + size
    if bytes_left < 0:
        raise ImageError("it is torn")
    text = file.read(length)
    content = memoryview(file.read(size))
    if crc32c(content, crc32c(text)) != checksum:
        raise ImageError("it is corrupted: a checksum does not match")
    return json.loads(text), content, bytes_left


def _decode(header: dict[str, Any], content: memoryview) -> Block:
    sections, position = [], 0
    for size in header["sections"]:
        sections.append(content[position : position + size])
        position += size
    names, _, heads, forms, vectors, extras, data = sections
    rows, dimension = int(header["rows"]), header["dimension"]
    text = str(names, "utf-8")
    keys = (text.split("\0") if rows else []) if header["plain"] else json.loads(text)
    extras_by_row, position = {}, 0
    for row, size, metadata, ignored in json.loads(str(extras, "utf-8")) if extras else ():
        extras_by_row[int(row)] = (
            None if size is None else bytes(data[position : position + size]),
            metadata,
            ignored,
        )
        position += size or 0
    return Block(
        namespace=header["namespace"],
        dimension=dimension,
        keys=keys,
        heads=np.frombuffer(heads, "<i8").reshape(rows, 4),
        forms=np.frombuffer(forms, np.uint8),
        vectors=None if dimension is None else np.frombuffer(vectors, "<f4").reshape(rows, dimension),
        extras=extras_by_row,
    )
