"""Ports that nobody has, for servers whose configuration names them before they start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

LOWEST, HIGHEST = 20_000, 30_000
"""Below those that the system gives to connections, which would take one between its choice and its use."""


def free_ports() -> tuple[int, int]:
    """Draw two ports on which nobody listens, so that tests side by side hardly ever draw the same."""
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
