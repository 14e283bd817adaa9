"""Settings of a client: every time and bound of its connection, named with its unit, with its default.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from delta_prop_wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Timeouts of a client. Raises UsageError if one is invalid.

    `open_timeout_s`: for opening, all attempts together. `reconnect_timeout_s`: for reconnecting, all
    attempts together. `connect_timeout_s`: for one connection; `handshake_timeout_s`: for the answer to its
    hello. `delivery_timeout_s`: for the outcome of an offer. `publish_timeout_s`: for a call of `publish`
    without a timeout. `close_timeout_s`: for the outcomes of all offers at the end.
    """

    open_timeout_s: float = 30.0
    reconnect_timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    heartbeat_interval_s: float = 5.0
    peer_timeout_s: float = 15.0
    delivery_timeout_s: float = 120.0
    publish_timeout_s: float = 30.0
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UsageError(f"{setting.name} = {value!r}: give a number of seconds above 0")
        if not self.heartbeat_interval_s < self.peer_timeout_s:
            raise UsageError(
                f"heartbeat_interval_s {self.heartbeat_interval_s}: not below peer_timeout_s "
                f"{self.peer_timeout_s}: give a lower one, so that a heartbeat comes before the timeout"
            )
