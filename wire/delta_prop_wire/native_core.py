"""The native core: the methods of `Core` in `delta_prop_core`, the extension that `native/` builds.

The only module that imports it in `wire/`. What it does not take, the general way does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import delta_prop_core as native

from delta_prop_wire.buffer import FRAMES_MAX, ReceiveBuffer
from delta_prop_wire.core import Core, FrameRun, LoggedRun
from delta_prop_wire.delta import KnownIds, Source
from delta_prop_wire.frames import Credit
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.credit_window import CreditWindow

_HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
_SOURCES, _KNOWN_IDS = tuple(Source), tuple(KnownIds)
_UNBOUNDED = Credit((1 << 63) - 1, (1 << 63) - 1)


class NativeCore(Core):
    """The native core. Its methods do what those of `Core` say."""

    __slots__ = ()

    make_slots = native.Slots
    fold_rows = staticmethod(native.fold_rows)

    def parse_batch(self, body: bytes | memoryview) -> Batch | None:
        return native.parse_batch(body)

    def batch_is_valid(self, batch: Batch) -> bool:
        return batch.validated or native.body_is_valid(batch.raw)

    def pack_keys(self, keys: Sequence[str], bytes_max: int) -> tuple[bytes, bytes] | None:
        return native.pack_keys(keys, bytes_max)

    def encode_columns(
        self,
        header: tuple[int, ...],
        packed_keys: tuple[bytes, bytes],
        namespace: str,
        *,
        width: int,
        values: Sequence[Buffer],
        indices: Sequence[Buffer] | None,
    ) -> Batch | None:
        return native.encode_columns(header, packed_keys, namespace, width, values, indices)

    def take_run(
        self, buffer: ReceiveBuffer, window: CreditWindow, payload_bytes_max: int, sequence_min: int
    ) -> FrameRun | None:
        view, start, end = buffer.unread()
        if end - start <= _HEAD_BYTES:
            return None
        deltas, size = window.remaining or _UNBOUNDED
        taken = native.take_run(
            view[start:end], (buffer.frames_max, deltas, size, payload_bytes_max, sequence_min)
        )
        if taken is None:
            return None
        sequence, ack_wanted, batches, rows, size, is_cut = taken
        # Each run ends at an invalid frame, so with many of them runs stay short.
        buffer.frames_max = 1 if is_cut else min(2 * buffer.frames_max, FRAMES_MAX)
        buffer.skip(size)
        window.spend(rows, size)
        return FrameRun(sequence, ack_wanted, batches, rows, size)

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
    ) -> tuple[bytes, int]:
        return native.pack_logged_head(
            (len(batch.raw), batch.crc, batch.attributes),
            offset,
            (source, known_ids, time, lamport, previous_crc, synced_offset),
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
    ) -> LoggedRun | None:
        place = offset, lamport, source, time, previous_crc, synced_offset
        run = native.log_run(batches, place, source, KnownIds.NONE, index)
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
