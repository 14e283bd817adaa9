"""Settings of the server: every limit of its connections, named with its unit, with its default.

Read once, where a server is made; relations between limits are checked here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from delta_prop_wire.buffer import ROOM_BYTES_MAX
from delta_prop_wire.errors import UsageError
from delta_prop_wire.header import CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX, HEADER_BYTES

MIB = 1024 * 1024
PORT = 7373
HTTP_PORT = 7374
JOBS_BYTES_MAX = 128 * MIB
"""What parts of jobs take in memory on their way to the disk, and from there to the log, with a batch of each
that may go over its bound.
"""

_MAY_BE_ZERO = frozenset({"vector_rate", "port", "http_port"})
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits come in deltas and in bytes; the first that is reached counts. Times are in the unit named.

    `vector_rate`: deltas a second that one vector may get; 0: no bound. `allow_anonymous`: serve without
    tokens where others than this machine can connect. Raises UsageError where a limit makes no sense or
    two contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    http_port: int = HTTP_PORT
    allow_anonymous: bool = False
    handshake_s_max: float = 10.0
    heartbeat_s: float = 5.0
    silence_s_max: float = 15.0
    receive_rate_min: int = 16 * 1024
    receiving_bytes_max: int = 256 * MIB
    connections_max: int = 1_000
    connections_per_host_max: int = 100
    http_connections_max: int = 100
    frame_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX
    producer_deltas_credit: int = 20_000
    producer_bytes_credit: int = 8 * MIB
    outlet_bytes_max: int = 1 * MIB
    send_bytes_max: int = 256 * 1024
    send_s_max: float = 60.0
    drain_s_max: float = 10.0
    token_rate: float = 1_000.0
    token_burst: int = 100
    vector_rate: float = 0.0
    clock_entries_max: int = CLOCK_ENTRIES_MAX
    lamport_jump_max: int = 1 << 32
    jobs_max: int = 1_000
    staged_bytes_max: int = 16 * 1024 * MIB
    jobs_kept_s_max: float = 86_400.0
    job_names_kept_s_max: float = 604_800.0

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name), one.default)
        if not self.heartbeat_s < self.silence_s_max:
            raise UsageError(
                f"heartbeat_s {self.heartbeat_s} and silence_s_max {self.silence_s_max}: they must rise, "
                "so that a peer has time for a heartbeat before it is taken for gone"
            )
        if not max(CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX) <= self.frame_bytes_max:
            raise UsageError(
                f"frame_bytes_max {self.frame_bytes_max}: a single delta may have {DELTA_PAYLOAD_BYTES_MAX} "
                "bytes with what stands around it"
            )
        if self.receiving_bytes_max < self.frame_bytes_max + HEADER_BYTES:
            raise UsageError(
                f"receiving_bytes_max {self.receiving_bytes_max}: one frame may have {self.frame_bytes_max} "
                f"(frame_bytes_max) and a header of {HEADER_BYTES}"
            )
        if self.frame_bytes_max > FRAME_PAYLOAD_BYTES_MAX:
            raise UsageError(f"frame_bytes_max {self.frame_bytes_max}: at most {FRAME_PAYLOAD_BYTES_MAX}")
        if self.clock_entries_max > CLOCK_ENTRIES_MAX:
            raise UsageError(f"clock_entries_max {self.clock_entries_max}: at most {CLOCK_ENTRIES_MAX}")
        if self.connections_per_host_max > self.connections_max:
            raise UsageError(
                f"connections_per_host_max {self.connections_per_host_max} is above connections_max "
                f"{self.connections_max}: one host cannot have more than all together"
            )

    def memory_bytes_max(self) -> int:
        """The worst case of what connections hold, in bytes: each one's hot queue, what it writes, its
        buffers, and all large frames half received. What producers' credit lets in stands in the service's
        own queue and log, within their bounds.
        """
        one = self.outlet_bytes_max + self.send_bytes_max + ROOM_BYTES_MAX + CONTROL_PAYLOAD_BYTES_MAX
        return self.connections_max * one + self.receiving_bytes_max + JOBS_BYTES_MAX


def _check(name: str, value: object, default: object) -> None:
    if isinstance(default, str):
        if not isinstance(value, str) or not value.isprintable() or value.split() != [value]:
            raise UsageError(f"{name} = {value!r:.80}: give an address or a name of this machine")
        return
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{name} = {value!r}: give true or false")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} = {value!r}: give a number")
    if isinstance(default, int) and not isinstance(value, int):
        raise UsageError(f"{name} = {value}: it counts, so give a whole number")
    if not (value > 0 or (name in _MAY_BE_ZERO and value == 0)):
        least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
        raise UsageError(f"{name} = {value}: it must be {least}")
    if name in ("port", "http_port") and value > _PORT_MAX:
        raise UsageError(f"{name} = {value}: ports end at {_PORT_MAX}")
