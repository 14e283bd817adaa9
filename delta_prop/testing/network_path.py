"""One direction of a fake connection: bytes in flight, their arrival times, and the faults of the path.

All calls are synchronous, and get the time as `now`; a waiter asks for the time of the next arrival.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from delta_prop_wire.errors import UsageError


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """Conditions of a path between two hosts.

    `latency_s`: latency of a byte; `jitter_s_max`: the maximum random addition to it; bytes stay in order.
    `bytes_per_s`: bandwidth. `chunk_bytes_max`: each send and receive takes a random number of bytes from 1
    to this. `buffer_bytes`: maximum bytes in flight or unread. `reset_bytes_mean`: the mean number of bytes
    after which a connection breaks; each connection draws its own number.
    """

    latency_s: float = 0.0005
    jitter_s_max: float = 0.0
    bytes_per_s: float = math.inf
    chunk_bytes_max: int | None = None
    buffer_bytes: int = 64 * 1024
    reset_bytes_mean: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "bytes_per_s", "chunk_bytes_max", "buffer_bytes", "reset_bytes_mean"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # time must pass between the two ends
                raise UsageError(f"{name} {value}: give a number above 0")
        if self.jitter_s_max < 0:
            raise UsageError(f"jitter_s_max {self.jitter_s_max}: give 0 or more")


class PieceKind(Enum):
    """Kind of a piece in flight."""

    DATA = "data"
    END = "end"  # no more data follows
    RESET = "reset"  # the connection is broken


@dataclass(slots=True)
class Piece:
    """A piece in flight, or arrived and unread. `arrives_at`: infinite while the path is cut."""

    kind: PieceKind
    data: memoryview
    arrives_at: float = field(default=math.inf)


class NetworkPath:
    """The path from one end of a connection to the other."""

    def __init__(
        self,
        source: str,
        target: str,
        *,
        conditions: NetworkConditions,
        rng: Random,
        fault_counts: Counter[str],
    ) -> None:
        self.source = source
        self.target = target
        self.conditions = conditions
        """The present conditions, which the network may replace."""
        self._rng = rng
        self._fault_counts = fault_counts
        self._pieces: deque[Piece] = deque()
        self._bytes = 0  # in flight or unread
        self._sent_at = -math.inf  # end of transmission of the last byte
        self._is_open = True
        self.is_discarding = False  # the reader discards what arrives
        self.discarded_bytes = 0

    @property
    def has_reset(self) -> bool:
        """True if a reset is in flight or has arrived."""
        return any(piece.kind is PieceKind.RESET for piece in self._pieces)

    def capacity(self, now: float) -> int:
        """Return the number of bytes that can be sent now."""
        if self.is_discarding:
            while (head := self._head(now)) is not None and head.kind is PieceKind.DATA:
                self._discard_first()
        return max(0, self.conditions.buffer_bytes - self._bytes)

    def put(self, now: float, data: memoryview) -> int:
        """Send bytes up to the capacity; return their number."""
        count = self._draw_count(min(len(data), self.capacity(now)))
        if count:
            self._bytes += count
            self._depart(now, Piece(PieceKind.DATA, memoryview(bytes(data[:count]))))
        return count

    def put_end(self, now: float) -> None:
        """Send the end: no more data follows."""
        self._depart(now, Piece(PieceKind.END, memoryview(b"")))

    def put_reset(self, now: float) -> None:
        """Break the connection; bytes in flight or unread are lost."""
        self._lose_data()
        self._depart(now, Piece(PieceKind.RESET, memoryview(b"")))

    def take(self, now: float, buffer: memoryview) -> int | None:
        """Copy arrived bytes into the buffer; return their number; 0: the end; None: none have arrived."""
        head = self._head(now)
        if head is None or head.kind is PieceKind.RESET:
            return None
        if head.kind is PieceKind.END:
            return 0
        count_max, taken = self._draw_count(len(buffer)), 0
        while taken < count_max and (head := self._head(now)) is not None and head.kind is PieceKind.DATA:
            count = min(len(head.data), count_max - taken)
            buffer[taken : taken + count] = head.data[:count]
            head.data = head.data[count:]
            self._bytes -= count
            taken += count
            if not head.data:
                self._pieces.popleft()
        return taken

    def is_reset(self, now: float) -> bool:
        """True if the reset has arrived."""
        return any(piece.kind is PieceKind.RESET and piece.arrives_at <= now for piece in self._pieces)

    def is_ended(self, now: float) -> bool:
        """True if the end has arrived, even if bytes before it are unread."""
        return any(piece.kind is PieceKind.END and piece.arrives_at <= now for piece in self._pieces)

    def has_data(self, now: float) -> bool:
        """True if bytes have arrived and are unread."""
        head = self._head(now)
        return head is not None and head.kind is PieceKind.DATA

    def next_at(self, now: float) -> float:
        """Return the next arrival time; infinite if nothing will arrive by itself."""
        return min((piece.arrives_at for piece in self._pieces if piece.arrives_at > now), default=math.inf)

    def hold(self, now: float) -> None:
        """Cut the path: pieces that have not arrived wait, and so do all that are sent from now on."""
        if self._is_open:
            self._is_open = False
            for piece in self._pieces:
                if piece.arrives_at > now:
                    piece.arrives_at = math.inf
                    self._fault_counts["held up"] += 1

    def release(self, now: float) -> None:
        """Heal the path: pieces that waited are sent now, in their order."""
        if not self._is_open:
            self._is_open = True
            waiting = [piece for piece in self._pieces if piece.arrives_at == math.inf]
            for _ in waiting:
                self._pieces.pop()
            for piece in waiting:
                self._depart(now, piece)

    # --- internals

    def _head(self, now: float) -> Piece | None:
        return self._pieces[0] if self._pieces and self._pieces[0].arrives_at <= now else None

    def _discard_first(self) -> None:
        count = len(self._pieces.popleft().data)
        self._bytes -= count
        self.discarded_bytes += count

    def _lose_data(self) -> None:
        self._fault_counts["bytes lost by a reset"] += self._bytes
        self._pieces = deque(piece for piece in self._pieces if piece.kind is PieceKind.RESET)
        self._bytes = 0

    def _draw_count(self, count: int) -> int:
        chunk_bytes_max = self.conditions.chunk_bytes_max
        if chunk_bytes_max is None or count == 0:
            return count
        return min(count, self._rng.randint(1, chunk_bytes_max))

    def _depart(self, now: float, piece: Piece) -> None:
        conditions = self.conditions
        if self._is_open:
            previous_arrival = self._pieces[-1].arrives_at if self._pieces else -math.inf
            self._sent_at = max(now, self._sent_at) + len(piece.data) / conditions.bytes_per_s
            jitter_s = self._rng.uniform(0, conditions.jitter_s_max)
            piece.arrives_at = max(previous_arrival, self._sent_at + conditions.latency_s + jitter_s)
        else:
            self._fault_counts["held up"] += 1
        self._pieces.append(piece)
