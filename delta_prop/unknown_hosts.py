"""Hosts that no name service knows, told apart from those that cannot be asked for at the moment.

No event loop: each client looks names up in its own way.
"""

from __future__ import annotations

import socket

from delta_prop.misconfigured import Misconfigured

_UNKNOWN = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def unknown_host(host: str, error: OSError | UnicodeError) -> Misconfigured | None:
    """Report a host without an address; None where it may have one another time."""
    if isinstance(error, OSError) and error.errno not in _UNKNOWN:
        return None
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Misconfigured(f"host {host!r:.80} is not known here ({why}): correct its name, or give its number")
