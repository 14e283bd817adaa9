"""Detection of hosts unknown to the name service, as opposed to temporary failures of the lookup.

No event loop: each client looks names up in its own way.
"""

from __future__ import annotations

import socket

from delta_prop.platform.connection_faults import Misconfigured

_UNKNOWN = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def unknown_host(host: str, error: OSError | UnicodeError) -> Misconfigured | None:
    """Return the fault of a host without an address; None if a retry may find one."""
    if isinstance(error, OSError) and error.errno not in _UNKNOWN:
        return None
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Misconfigured(f"host {host!r:.80} is not known here ({why}): correct the name, or give its IP")
