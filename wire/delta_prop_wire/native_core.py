"""The native core: the methods of `Core` in `delta_prop_core`, the extension that `native/` builds.

The only module that imports it in `wire/`. What it does not take, the general way does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import delta_prop_core as native
import numpy as np

from delta_prop_wire.core import Core
from delta_prop_wire.delta import Delta, KnownIds, Operation, Priority, Source
from delta_prop_wire.frame_runs import FrameRun, RunLimits
from delta_prop_wire.stamp import LoggedRun, LogName, Stamp

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_wire.batch import Batch

_SOURCES, _KNOWN_IDS = tuple(Source), tuple(KnownIds)
_ARRAY, _F32, _U32 = np.ndarray, np.dtype("<f4"), np.dtype("<u4")
_NONE = ()  # there is one empty tuple
_LOCAL = Source.LOCAL


class NativeCore(Core):
    """The native core. Its methods do what those of `Core` say."""

    __slots__ = ()

    make_slots = native.Slots
    fold_rows = staticmethod(native.fold_rows)

    def parse_batch(self, body: bytes | memoryview) -> Batch | None:
        return native.parse_batch(body)

    def batch_is_valid(self, batch: Batch) -> bool:
        return native.body_is_valid(batch.raw)

    def pack_delta(self, delta: Delta) -> native.PackedRows | None:
        if type(delta) is not Delta or type(delta.operation) is not Operation:
            return None
        if (
            delta.metadata is not None
            or delta.id is not None
            or delta.dot is not None
            or delta.expect is not None
            or delta.parents is not _NONE
            or delta.clock is not _NONE
            or delta.topics is not _NONE
            or delta.timestamp != 0
            or delta.source is not _LOCAL
            or type(delta.priority) is not Priority
        ):
            return None
        operation = delta.operation
        values, indices, packed_values, packed_indices = operation.values, operation.indices, None, None
        if values is not None:
            if type(values) is not _ARRAY or values.dtype is not _F32 or values.ndim != 1:
                return None
            packed_values = values.tobytes()
        if indices is not None:
            if type(indices) is not _ARRAY or indices.dtype is not _U32 or indices.ndim != 1:
                return None
            packed_indices = indices.tobytes()
        return native.pack_row(
            delta.vector_id, delta.namespace, operation.kind, packed_values, packed_indices, operation.data
        )

    pack_columns = staticmethod(native.pack_columns)
    encode_rows = staticmethod(native.encode_rows)

    def take_run(self, received: memoryview, limits: RunLimits) -> FrameRun | None:
        taken = native.take_run(received, limits)
        return None if taken is None else FrameRun(*taken)

    def pack_logged_head(
        self,
        batch: Batch,
        offset: int,
        *,
        lamport: int,
        source: Source,
        time: int,
        previous_crc: int,
        synced_offset: int,
        known_ids: KnownIds,
        log: LogName,
    ) -> tuple[bytes, int]:
        return native.pack_logged_head(
            (len(batch.raw), batch.crc, batch.attributes),
            offset,
            (source, known_ids, time, lamport, previous_crc, synced_offset),
            log,
        )

    def log_run(
        self,
        batches: list[Batch],
        offset: int,
        *,
        lamport: int,
        source: Source,
        time: int,
        previous_crc: int,
        synced_offset: int,
        index: tuple[int, int, int],
        log: LogName,
    ) -> LoggedRun | None:
        place = offset, lamport, source, time, previous_crc, synced_offset
        run = native.log_run(batches, place, source, KnownIds.NONE, index, log)
        return None if run is None else LoggedRun(*run)

    def unpack_logged_head(self, raw: Buffer) -> tuple[int, int, Stamp] | None:
        read = native.unpack_logged_head(raw)
        if read is None:
            return None
        offset, length, numbers, log = read
        lamport, source, time, previous, body, synced_offset = numbers
        epoch, stream, partition, known_ids, crc = log
        stamp = Stamp(
            lamport, _SOURCES[source], time, previous, body, synced_offset,
            epoch, stream, partition, _KNOWN_IDS[known_ids], crc,
        )  # fmt: skip
        return offset, length, stamp
