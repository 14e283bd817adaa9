"""Compression round-trips, and no announced size is trusted without a check."""

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
EACH_CODEC = pytest.mark.parametrize("codec", Compression)


def compressed_body(codec: Compression, body: bytes = BODY) -> bytes:
    compressed = compress(body, codec)
    assert compressed is not None
    return compressed


def decompress_error(raw: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decompress(raw)
    return caught.value


@EACH_CODEC
def test_compressed_body_round_trips(codec: Compression) -> None:
    raw = compressed_body(codec)
    assert raw[0] == codec
    assert struct.unpack_from("<I", raw, 1)[0] == len(BODY) == uncompressed_size(raw)
    assert len(raw) < len(BODY) // 10
    assert decompress(raw) == BODY
    assert decompress(memoryview(raw)) == BODY


@EACH_CODEC
def test_small_or_incompressible_body_is_not_compressed(codec: Compression) -> None:
    assert compress(bytes(BODY_BYTES_MIN - 1), codec) is None
    assert compress(bytes(BODY_BYTES_MIN), codec) is not None
    assert compress(random.Random(1).randbytes(5000), codec) is None


@EACH_CODEC
def test_size_beyond_the_bound_allocates_nothing(codec: Compression) -> None:
    bomb = struct.pack("<BI", codec, SIZE_MAX + 1) + compressed_body(codec)[5:]
    tracemalloc.start()
    try:
        error = decompress_error(bomb)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert error.code is ErrorCode.TOO_LARGE


def test_size_in_the_zstd_frame_is_not_trusted() -> None:
    huge = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    error = decompress_error(struct.pack("<BI", Compression.ZSTD, 2048) + huge)
    assert error.code is ErrorCode.BAD_FRAME
    assert "67108864" in error.message


def test_zstd_frame_without_its_size_is_refused() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    raw = stream.compress(BODY) + stream.flush()
    assert decompress_error(struct.pack("<BI", Compression.ZSTD, len(BODY)) + raw).code is ErrorCode.BAD_FRAME


@EACH_CODEC
@pytest.mark.parametrize("announced", [0, 1, len(BODY) - 1, len(BODY) + 1, SIZE_MAX])
def test_wrong_size_is_refused(codec: Compression, announced: int) -> None:
    assert (
        decompress_error(struct.pack("<BI", codec, announced) + compressed_body(codec)[5:]).code
        is ErrorCode.BAD_FRAME
    )


@EACH_CODEC
def test_truncated_or_extended_body_is_refused(codec: Compression) -> None:
    raw = compressed_body(codec)
    for length in range(len(raw)):
        assert decompress_error(raw[:length]).code is ErrorCode.BAD_FRAME
    assert decompress_error(raw + b"x").code is ErrorCode.BAD_FRAME


@EACH_CODEC
def test_flipped_bit_in_a_compressed_body_is_refused_or_harmless(codec: Compression) -> None:
    batch = encode_batch([Delta("a", opaque(BODY))], origin=1, base=1)
    frame = BatchFrame(1, batch)
    raw = bytearray(encode(frame, compression=codec))
    for bit in range(64 * 8, 8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ProtocolError):
            assert decode(bytes(raw)) == frame  # an equivalent encoding
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("number", [0, 3, 255])
def test_unknown_codec_is_an_unsupported_flag(number: int) -> None:
    error = decompress_error(struct.pack("<BI", number, 4) + b"abcd")
    assert error.code is ErrorCode.UNSUPPORTED_FLAG
    assert "1 (LZ4) or 2 (ZSTD)" in error.message


@EACH_CODEC
def test_missing_codec_error_names_the_package_to_install(
    codec: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, import_module = compressed_body(codec), builtins.__import__

    def import_without_codecs(name: str, *args: Any) -> Any:
        if name.partition(".")[0] in ("lz4", "zstandard"):
            raise ImportError(name)
        return import_module(name, *args)

    monkeypatch.setattr(builtins, "__import__", import_without_codecs)
    error = decompress_error(raw)
    assert error.code is ErrorCode.UNSUPPORTED_FLAG
    assert "install delta-prop[compress]" in error.message
    with pytest.raises(UsageError, match=r"install delta-prop\[compress\]"):
        compress(BODY, codec)


def test_only_installed_codecs_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_codecs() == (Compression.LZ4, Compression.ZSTD)
    monkeypatch.setattr(compression, "find_spec", lambda name: None if name == "lz4" else object())
    assert available_codecs() == (Compression.ZSTD,)


def test_lz4_block_of_another_encoder_is_decompressed() -> None:
    block = lz4.block.compress(BODY, mode="high_compression", store_size=False)
    assert decompress(struct.pack("<BI", 1, len(BODY)) + block) == BODY


def test_importing_the_codec_loads_no_optional_package() -> None:
    code = "import sys, delta_prop_wire.codec; print('lz4' in sys.modules, 'zstandard' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "False"]
