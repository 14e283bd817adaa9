"""A compressed frame on disk reads as its uncompressed frame or as corruption, never as another frame."""

from __future__ import annotations

from collections import Counter

import pytest

from delta_prop_broker.corruption import BadFrame, CodecMissing
from delta_prop_broker.segments.compressed import compress_frame
from delta_prop_broker.segments.frames import FrameScanner, heads_after
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire import compression
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.compression import Compression
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.spec import ErrorCode, Flag
from tests.broker.compressed import logged_frames, scan_frames, stored_form
from tests.broker.durable import frame

EACH_CODEC = pytest.mark.parametrize("codec", Compression, ids=lambda codec: codec.name)


@EACH_CODEC
def test_file_of_mixed_frames_reads_as_uncompressed_frames(codec: Compression) -> None:
    frames = logged_frames()
    stored_frames = [stored_form(logged, codec) for logged in frames]
    assert [len(raw) % 8 for raw in stored_frames] == [0] * 6
    assert [bool(raw[3] & Flag.COMPRESSED) for raw in stored_frames] == [True, True, False] * 2
    locations = scan_frames(b"".join(stored_frames))
    assert [frame(location.logged) for location in locations] == [frame(logged) for logged in frames]
    assert [location.size for location in locations] == [len(raw) for raw in stored_frames]
    assert [location.codec for location in locations] == [codec, codec, 0] * 2


@EACH_CODEC
def test_bytes_before_the_seal_are_the_compressed_wire_frame(codec: Compression) -> None:
    logged = logged_frames(frame_count=1)[0]
    raw = stored_form(logged, codec)
    length = 16 + int.from_bytes(raw[12:16], "big")
    uncompressed = decode(frame(logged))
    assert isinstance(uncompressed, BatchFrame)
    assert raw[:length] == encode(uncompressed, compression=codec)
    assert decode(raw[:length]) == uncompressed
    assert 4 <= len(raw) - length < 12


@EACH_CODEC
def test_flipped_bit_in_a_compressed_frame_is_found_in_that_frame(codec: Compression) -> None:
    frames = logged_frames(frame_count=3, with_small=False)
    stored_frames = [stored_form(logged, codec) for logged in frames]
    start, end = len(stored_frames[0]), len(stored_frames[0]) + len(stored_frames[1])
    raw = bytearray(b"".join(stored_frames))
    reasons: Counter[str] = Counter()
    for position in range(start, end):
        for bit in range(8):
            raw[position] ^= 1 << bit
            disk = SimDisk()
            disk.put("file", bytes(raw))
            file = disk.open("file", read_only=True)
            intact = []
            with pytest.raises(BadFrame) as caught:
                intact.extend(FrameScanner(file, position=0, offset=0, end=len(raw), previous_crc=None))
            assert [frame(location.logged) for location in intact] == [frame(frames[0])]
            assert (caught.value.position, caught.value.offset) == (start, frames[1].offset)
            position_after, head = next(heads_after(file, start + caught.value.skip, len(raw)))
            assert (position_after, head.offset) == (end, frames[2].offset), "the scan finds the next frame"
            reasons["seal" if "compressed frame's" in caught.value.reason else "head"] += 1
            raw[position] ^= 1 << bit
    print(f"{8 * (end - start)} flipped bits, found by: {dict(reasons)}")
    assert min(reasons.values()) > 500


def test_oversized_frame_is_refused_before_decompression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = bytearray(stored_form(logged_frames(frame_count=1)[0], Compression.LZ4))
    raw[65:69] = (1 << 30).to_bytes(4, "little")

    def fail_test(*_: object) -> bytes:
        raise AssertionError("the size must be refused before decompression")

    monkeypatch.setattr("delta_prop_broker.segments.compressed.decompress", fail_test)
    with pytest.raises(BadFrame, match="announces 1073741824 bytes; the maximum is 16777168"):
        scan_frames(bytes(raw))


def test_missing_codec_is_not_reported_as_corruption(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stored_form(logged_frames(frame_count=1)[0], Compression.ZSTD)

    def raise_import_error(*_: object) -> bytes:
        raise ImportError

    monkeypatch.setattr(compression, "_decompress_zstd", raise_import_error)
    with pytest.raises(CodecMissing, match=r"compressed with zstd.*install delta-prop\[compress\]") as caught:
        scan_frames(raw)
    assert caught.value.codec == "zstd"


def test_frame_that_fails_to_round_trip_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = logged_frames(frame_count=1)[0]
    monkeypatch.setattr("delta_prop_broker.segments.compressed.decompress", lambda packed: b"something else")
    assert compress_frame(logged.head, logged.batch.body, Compression.LZ4) is None


def test_truncated_compressed_frame_is_corruption() -> None:
    raw = stored_form(logged_frames(frame_count=1)[0], Compression.LZ4)
    for size in range(1, len(raw)):
        with pytest.raises(BadFrame):
            scan_frames(raw[:size])


def test_stored_frame_with_its_seal_is_refused_by_the_decoder() -> None:
    """On the wire, a frame ends before the seal."""
    raw = stored_form(logged_frames(frame_count=1)[0], Compression.LZ4)
    with pytest.raises(ProtocolError) as caught:
        decode(raw)
    assert caught.value.code is ErrorCode.BAD_FRAME
