"""Compression: what comes out is what went in, and no size is believed that was not checked."""

from __future__ import annotations

import builtins
import contextlib
import random
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import lz4.block
import pytest
import zstandard

from delta_prop_wire import compression
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.compression import (
    BODY_BYTES_MIN,
    Compression,
    available_codecs,
    compress,
    decompress,
    uncompressed_size,
)
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, STAMP_BYTES, ErrorCode

BODY = b"the same words, again and again; " * 100
SIZE_MAX = FRAME_PAYLOAD_BYTES_MAX - STAMP_BYTES
EACH = pytest.mark.parametrize("codec", Compression)


def packed(codec: Compression, body: bytes = BODY) -> bytes:
    found = compress(body, codec)
    assert found is not None
    return found


def refused(raw: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decompress(raw)
    return caught.value


@EACH
def test_what_comes_out_is_what_went_in(codec: Compression) -> None:
    raw = packed(codec)
    assert raw[0] == codec
    assert struct.unpack_from("<I", raw, 1)[0] == len(BODY) == uncompressed_size(raw)
    assert len(raw) < len(BODY) // 10
    assert decompress(raw) == BODY
    assert decompress(memoryview(raw)) == BODY


@EACH
def test_small_and_stubborn_bodies_travel_as_they_are(codec: Compression) -> None:
    assert compress(bytes(BODY_BYTES_MIN - 1), codec) is None
    assert compress(bytes(BODY_BYTES_MIN), codec) is not None
    assert compress(random.Random(1).randbytes(5000), codec) is None


@EACH
def test_a_size_beyond_the_bound_allocates_nothing(codec: Compression) -> None:
    bomb = struct.pack("<BI", codec, SIZE_MAX + 1) + packed(codec)[5:]
    tracemalloc.start()
    try:
        error = refused(bomb)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert error.code is ErrorCode.TOO_LARGE


def test_what_zstd_says_of_itself_is_not_believed() -> None:
    huge = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    error = refused(struct.pack("<BI", Compression.ZSTD, 2048) + huge)
    assert error.code is ErrorCode.BAD_FRAME
    assert "67108864" in error.message


def test_a_zstd_frame_without_its_size_is_refused() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    raw = stream.compress(BODY) + stream.flush()
    assert refused(struct.pack("<BI", Compression.ZSTD, len(BODY)) + raw).code is ErrorCode.BAD_FRAME


@EACH
@pytest.mark.parametrize("told", [0, 1, len(BODY) - 1, len(BODY) + 1, SIZE_MAX])
def test_a_wrong_size_is_refused(codec: Compression, told: int) -> None:
    assert refused(struct.pack("<BI", codec, told) + packed(codec)[5:]).code is ErrorCode.BAD_FRAME


@EACH
def test_truncated_and_lengthened(codec: Compression) -> None:
    raw = packed(codec)
    for length in range(len(raw)):
        assert refused(raw[:length]).code is ErrorCode.BAD_FRAME
    assert refused(raw + b"x").code is ErrorCode.BAD_FRAME


@EACH
def test_flipped_bits_are_refused_or_caught_by_the_bodys_checksum(codec: Compression) -> None:
    batch = encode_batch([Delta("a", opaque(BODY))], origin=1, base=1)
    frame = BatchFrame(1, batch)
    raw = bytearray(encode(frame, compression=codec))
    for bit in range(64 * 8, 8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ProtocolError):
            assert decode(bytes(raw)) == frame  # another way to say the same
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("number", [0, 3, 255])
def test_an_unknown_codec_is_an_unsupported_flag(number: int) -> None:
    error = refused(struct.pack("<BI", number, 4) + b"abcd")
    assert error.code is ErrorCode.UNSUPPORTED_FLAG
    assert "1 (LZ4) or 2 (ZSTD)" in error.message


@EACH
def test_where_the_codec_is_not_installed_the_cure_is_told(
    codec: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, real = packed(codec), builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] in ("lz4", "zstandard"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    error = refused(raw)
    assert error.code is ErrorCode.UNSUPPORTED_FLAG
    assert "install delta-prop[compress]" in error.message
    with pytest.raises(UsageError, match=r"install delta-prop\[compress\]"):
        compress(BODY, codec)


def test_only_what_is_installed_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_codecs() == (Compression.LZ4, Compression.ZSTD)
    monkeypatch.setattr(compression, "find_spec", lambda name: None if name == "lz4" else object())
    assert available_codecs() == (Compression.ZSTD,)


def test_an_lz4_block_of_another_maker() -> None:
    block = lz4.block.compress(BODY, mode="high_compression", store_size=False)
    assert decompress(struct.pack("<BI", 1, len(BODY)) + block) == BODY


def test_the_codec_loads_no_extra() -> None:
    told = "import sys, delta_prop_wire.codec; print('lz4' in sys.modules, 'zstandard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
