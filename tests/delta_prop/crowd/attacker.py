"""A program that sends a server frames nobody should send: PORT COUNT PER_SECOND SEED, and a line to begin.

Most come behind a sound hello. A process of its own, behind all others at the machine's cores, since who
attacks has cores of its own: what it costs is not taken for what it does.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Hello, Subscribe

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parents[3] / "docs" / "protocol-golden.json"


def attack(port: int, count: int, per_s: float, seed: int) -> None:
    """One connection for each frame, at a steady pace."""
    chance = random.Random(seed)
    hello = encode(Subscribe(1, Hello()))
    began = time.monotonic()
    for number, raw in enumerate(mutated(chance, count)):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall((hello if chance.random() < 0.8 else b"") + raw)
            if chance.random() < 0.5:
                one.settimeout(0.002)
                one.recv(4096)
        time.sleep(max(began + number / per_s - time.monotonic(), 0))


def mutated(chance: random.Random, count: int) -> Iterator[bytes]:
    """Golden frames with bits turned, parts cut out or put in, lengths that lie, others behind them."""
    golden = [bytes.fromhex(one["hex"]) for one in json.loads(GOLDEN.read_text())["frames"]]
    for _ in range(count):
        raw = bytearray(chance.choice(golden))
        for _ in range(chance.choice((1, 1, 2, 8))):
            _mutate(chance, raw, golden)
        yield bytes(raw)


def _mutate(chance: random.Random, raw: bytearray, golden: list[bytes]) -> None:
    kind, at = chance.randrange(5), chance.randrange(len(raw))
    if kind == 0:
        raw[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del raw[max(at, 1) :]
    elif kind == 2:
        raw[at:at] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 3 and len(raw) >= 16:
        raw[12:16] = struct.pack(">I", chance.choice((0, 1, 1 << 20, 16 << 20, 0xFFFFFFFF)))
    else:
        raw += chance.choice(golden)


if __name__ == "__main__":
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    print("ready", flush=True)
    sys.stdin.readline()
    attack(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
