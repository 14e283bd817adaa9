"""Free TCP ports, for servers whose configuration names their ports before they start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

LOWEST, HIGHEST = 20_000, 30_000
"""Bounds of the range to draw from: below the system's ephemeral ports, which connections take."""


def free_ports() -> tuple[int, int]:
    """Draw two ports on which no process listens; concurrent tests rarely draw the same ports."""
    ports = list[int]()
    with ExitStack() as exits:
        while len(ports) < 2:
            port = random.SystemRandom().randrange(LOWEST, HIGHEST)
            try:
                exits.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            ports.append(port)
    return ports[0], ports[1]
