"""How one connection comes to its end."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True, eq=False)
class ConnectionEnd:
    """The end that either side has announced.

    `is_draining`: True once the server drains, until `drain_until`; rows below `log_end` are still
    delivered. `is_finishing`: True once the client has ended its side.
    """

    is_draining: bool = False
    drain_until: float = inf
    log_end: float = inf
    is_finishing: bool = False
