from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import KnownIds, Source

BOUNDARY: int
VERSION: str

def parse_batch(raw: Buffer) -> Batch | None: ...
def body_is_valid(raw: Buffer) -> bool: ...
def take_run(
    received: memoryview, limits: tuple[int, int, int, int, int, int]
) -> tuple[int, bool, list[Batch], int, int] | None: ...
def pack_logged_head(
    body: tuple[int, int, int],
    offset: int,
    stamp: tuple[int, int, int, int, int, int],
    log: tuple[int, int],
) -> tuple[bytes, int]: ...
def log_run(
    batches: list[Batch],
    place: tuple[int, int, int, int, int, int],
    source: Source,
    known_ids: KnownIds,
    index: tuple[int, int, int],
    log: tuple[int, int],
) -> tuple[list[LoggedBatch], list[Buffer], int, int, list[tuple[int, int, int]]] | None: ...
def unpack_logged_head(
    raw: Buffer,
) -> tuple[int, int, tuple[int, int, int, int, int, int], tuple[int, int, int, int, int]] | None: ...

class PackedRows:
    key: tuple[int, str, int]
    size: int

def pack_row(
    vector_id: object,
    namespace: object,
    kind: object,
    values: bytes | None,
    indices: bytes | None,
    data: object,
) -> PackedRows | None: ...
def pack_columns(
    keys: object, matrix: object, indices: object, namespace: object, kind: object
) -> PackedRows | None: ...
def encode_rows(
    rows: Sequence[PackedRows], header: tuple[int, int, int, int, int], clock: bytes
) -> Batch | None: ...
def fold_rows(
    tables: Sequence[Any],
    raw: bytes | memoryview,
    place: tuple[int, int],
    rows: NDArray[np.intp] | None,
    adds: bool,
) -> tuple[int, int]: ...

class Slots: ...

class Heads:
    count: int
    writer_count: int
    writers: list[int]
    is_complete: bool
    bytes: int

    def __init__(self, heads_max: int) -> None: ...
    def head(self, namespace: str, vector_id: str) -> tuple[int, int, bool] | None: ...
    def other_heads(self, origin: int, vectors: Sequence[tuple[str, str]]) -> list[tuple[int, int, int]]: ...
    def namespaces(self) -> list[tuple[str, int, bool]]: ...
    def namespace(self, name: str) -> tuple[int, bool]: ...
    def forget(self, namespace: str, vector_id: str) -> bool: ...
    def make_incomplete(self) -> None: ...
    def set_namespace(self, name: str, dimension: int, is_complete: bool | None) -> None: ...
    def check(self, raw: Buffer) -> tuple[int, str, int, int] | None: ...
    def note_appended(self, raw: Buffer, is_replica: bool) -> None: ...
    def concurrent_rows(self, raw: Buffer, seen: Callable[[int], int]) -> list[tuple[int, int, int]]: ...
    def append_run(
        self, raws: Sequence[Buffer], is_replica: bool, seen: Callable[[int], int]
    ) -> tuple[int, int]: ...
    def head_range(self, name: str) -> tuple[int, int]: ...
    def copy_heads(
        self, name: str, first: int, end: int
    ) -> tuple[list[str], list[int], list[int], list[bool]]: ...
    def restore_heads(
        self, name: str, keys: bytes, writers: bytes, counters: bytes, states: bytes
    ) -> None: ...
    def restore_writers(self, writers: Sequence[int], is_complete: bool) -> None: ...
    def load_state(
        self, namespace: str, vector_id: str, dot: tuple[int, int], is_dead: bool, width: int | None
    ) -> None: ...
    def keep_bound(self) -> None: ...
