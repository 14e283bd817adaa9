"""Settings of a client: every time and bound of its connection, named with its unit, with its default.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from delta_prop_wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """`open_s_max`: how long opening may try. `offline_s_max`: how long a client tries to come back before it
    gives up. `connect_s_max`: for one connection, `handshake_s_max`: for the answer to its hello.
    `delivery_s_max`: how long an offer may go without an outcome. `publish_s_max`: how long `publish` waits,
    unless it is told. `close_s_max`: for what is open at the end. Raises UsageError where one makes no sense.
    """

    open_s_max: float = 30.0
    offline_s_max: float = 300.0
    connect_s_max: float = 10.0
    handshake_s_max: float = 10.0
    heartbeat_s: float = 5.0
    silence_s_max: float = 15.0
    delivery_s_max: float = 120.0
    publish_s_max: float = 30.0
    close_s_max: float = 10.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UsageError(f"{one.name} = {value!r}: give a number of seconds above 0")
        if not self.heartbeat_s < self.silence_s_max:
            raise UsageError(
                f"heartbeat_s {self.heartbeat_s} and silence_s_max {self.silence_s_max}: they must rise, so "
                "that a service has time for a heartbeat before it is taken for gone"
            )
