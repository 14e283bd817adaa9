"""Settings of the server: every limit of its connections, named with its unit, with its default.

Read once, when a server is made; only this module checks relations between limits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from delta_prop.client.addresses import Address
from delta_prop_wire.buffer import BUFFER_BYTES_MAX
from delta_prop_wire.control_values import NAME_BYTES_MAX
from delta_prop_wire.errors import UsageError
from delta_prop_wire.header import CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX, HEADER_BYTES

MIB = 1024 * 1024
PORT = 7373
HTTP_PORT = 7374
JOBS_BYTES_MAX = 128 * MIB
"""Maximum memory of jobs while they are staged and published; an oversized batch of each is included."""

_QUOTAS = (
    "client_bytes_in_s", "client_bytes_out_s", "client_rows_in_s", "client_rows_out_s", "client_requests_s",
    "streams_max", "partitions_max",
)  # fmt: skip
_ZERO_ALLOWED = frozenset({"vector_rate", "port", "http_port", *_QUOTAS})
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits are in deltas and in bytes; the first one reached applies. A name ends with its unit of time.

    `advertise`: host:port that clients are told, None for none. `allow_anonymous`: serve without tokens even
    if other machines can connect. `receive_rate_min`: bytes per second at which a frame must arrive.
    `token_rate`, `token_burst`: deltas per second, and deltas at once, of a token that names none.
    `vector_rate`: deltas per second that one vector may get, 0 for no limit. `client_…_s`: amounts per second
    of each client id of a token, `in` from it and `out` to it, 0 for no limit. `streams_max`,
    `partitions_max`: how many streams may be created, and with how many partitions in total, 0 for no limit.
    Raises UsageError if a limit makes no sense, or two contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    http_port: int = HTTP_PORT
    advertise: str | None = None
    allow_anonymous: bool = False
    handshake_timeout_s: float = 10.0
    heartbeat_interval_s: float = 5.0
    peer_timeout_s: float = 15.0
    receive_rate_min: int = 16 * 1024
    receiving_bytes_max: int = 256 * MIB
    connections_max: int = 1_000
    connections_per_host_max: int = 100
    http_connections_max: int = 100
    frame_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX
    producer_deltas_credit: int = 20_000
    producer_bytes_credit: int = 8 * MIB
    subscriber_bytes_max: int = 1 * MIB
    send_bytes_max: int = 256 * 1024
    send_timeout_s: float = 60.0
    drain_timeout_s: float = 10.0
    token_rate: float = 1_000.0
    token_burst: int = 100
    vector_rate: float = 0.0
    clock_entries_max: int = CLOCK_ENTRIES_MAX
    lamport_jump_max: int = 1 << 32
    jobs_max: int = 1_000
    staged_bytes_max: int = 16 * 1024 * MIB
    job_decision_timeout_s: float = 86_400.0
    job_name_retention_s: float = 604_800.0
    partition_idle_s: float = 60.0
    client_bytes_in_s: float = 0.0
    client_bytes_out_s: float = 0.0
    client_rows_in_s: float = 0.0
    client_rows_out_s: float = 0.0
    client_requests_s: float = 0.0
    streams_max: int = 0
    partitions_max: int = 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            if setting.name == "advertise":
                _check_advertised(self.advertise)
            else:
                _check(setting.name, getattr(self, setting.name), setting.default)
        if not self.heartbeat_interval_s < self.peer_timeout_s:
            raise UsageError(
                f"heartbeat_interval_s {self.heartbeat_interval_s}: not below peer_timeout_s "
                f"{self.peer_timeout_s}: give a lower one, so that a heartbeat comes before the timeout"
            )
        if not max(CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX) <= self.frame_bytes_max:
            raise UsageError(
                f"frame_bytes_max {self.frame_bytes_max}: a single delta with its header may have "
                f"{DELTA_PAYLOAD_BYTES_MAX} bytes: give at least that"
            )
        if self.receiving_bytes_max < self.frame_bytes_max + HEADER_BYTES:
            raise UsageError(
                f"receiving_bytes_max {self.receiving_bytes_max}: one frame may have {self.frame_bytes_max} "
                f"bytes (frame_bytes_max) and a header of {HEADER_BYTES}: give at least both together"
            )
        if self.frame_bytes_max > FRAME_PAYLOAD_BYTES_MAX:
            raise UsageError(f"frame_bytes_max {self.frame_bytes_max}: give up to {FRAME_PAYLOAD_BYTES_MAX}")
        if self.clock_entries_max > CLOCK_ENTRIES_MAX:
            raise UsageError(f"clock_entries_max {self.clock_entries_max}: give up to {CLOCK_ENTRIES_MAX}")
        if self.connections_per_host_max > self.connections_max:
            raise UsageError(
                f"connections_per_host_max {self.connections_per_host_max}: above connections_max "
                f"{self.connections_max}: give a lower one"
            )

    def memory_bytes_max(self) -> int:
        """Return the worst-case memory of connections, in bytes.

        It includes the send queue, writes and buffers of each connection, and all partly received large
        frames. Received deltas count for the service's queue and log, within their limits.
        """
        per_connection = (
            self.subscriber_bytes_max + self.send_bytes_max + BUFFER_BYTES_MAX + CONTROL_PAYLOAD_BYTES_MAX
        )
        return self.connections_max * per_connection + self.receiving_bytes_max + JOBS_BYTES_MAX


def _check_advertised(address: object) -> None:
    if address is None:
        return
    try:
        is_valid = isinstance(address, str) and str(Address.parse(address)) == address
    except UsageError:
        is_valid = False
    if not (is_valid and str(address).isprintable() and len(str(address).encode()) <= NAME_BYTES_MAX):
        raise UsageError(
            f"advertise = {address!r:.80}: give HOST:PORT, up to {NAME_BYTES_MAX} bytes, such as "
            "facts.example.net:7373 or [2001:db8::1]:7373"
        )


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
        raise UsageError(f"{name} = {value}: it is a count: give a whole number")
    if not (value > 0 or (name in _ZERO_ALLOWED and value == 0)):
        bound = "of at least 0" if name in _ZERO_ALLOWED else "above 0"
        raise UsageError(f"{name} = {value}: give a number {bound}")
    if name in ("port", "http_port") and value > _PORT_MAX:
        raise UsageError(f"{name} = {value}: not a port: give up to {_PORT_MAX}")
