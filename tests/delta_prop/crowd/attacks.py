"""Connections that send a mutated frame, or only a hello, to a server."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Hello, Subscribe

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

GOLDEN = Path(__file__).parents[3] / "docs" / "protocol-golden.json"


@contextmanager
def attacking_connection(port: int, raw: bytes, *, says_hello: bool) -> Iterator[None]:
    """Send `raw`, after a hello if `says_hello`; when the block ends, close once the server has closed."""
    hello = encode(Subscribe(1, Hello())) if says_hello else b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(hello + raw)
        yield
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.1)  # a mutated frame may be a subscription, which continues
        while connection.recv(65_536):
            pass


def mutated_frames(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield golden frames with flipped bits, removed or inserted bytes, wrong lengths, or frames appended."""
    valid_frames = [bytes.fromhex(frame["hex"]) for frame in json.loads(GOLDEN.read_text())["frames"]]
    for _ in range(count):
        raw = bytearray(rng.choice(valid_frames))
        for _ in range(rng.choice((1, 1, 2, 8))):
            _mutate(rng, raw, valid_frames)
        yield bytes(raw)


def _mutate(rng: random.Random, raw: bytearray, valid_frames: list[bytes]) -> None:
    kind, position = rng.randrange(5), rng.randrange(len(raw))
    if kind == 0:
        raw[position] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del raw[max(position, 1) :]
    elif kind == 2:
        raw[position:position] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 3 and len(raw) >= 16:
        raw[12:16] = struct.pack(">I", rng.choice((0, 1, 1 << 20, 16 << 20, 0xFFFFFFFF)))
    else:
        raw += rng.choice(valid_frames)
