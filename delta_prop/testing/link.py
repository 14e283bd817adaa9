"""One direction of a false connection: what is under way, when it arrives, what stands in its way.

Plain calls with `now`; who waits asks when something will happen next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from random import Random


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a way between two hosts is like.

    `latency_s`: how long a byte is under way; `jitter_s_max`: up to so much longer, drawn, the order kept.
    `bytes_per_s`: how fast bytes can be sent. `chunk_bytes_max`: what one receive gets and one send gets
    rid of is drawn from 1 to this. `buffer_bytes`: how much may be under way or unread. `reset_bytes_mean`:
    a connection breaks after so many bytes on average, drawn.
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
            if value is not None and not value > 0:  # time must pass between two ends
                raise UsageError(f"{name} is {value}: it is above 0")
        if self.jitter_s_max < 0:
            raise UsageError(f"jitter_s_max is {self.jitter_s_max}: it is 0 or more")


class Kind(Enum):
    """What travels."""

    DATA = "data"
    END = "end"  # no more data comes
    RESET = "reset"  # the connection is broken


@dataclass(slots=True)
class Piece:
    """Something under way. `arrives_at` is infinite while it is held up."""

    kind: Kind
    data: memoryview
    arrives_at: float = field(default=math.inf)


class Way:
    """From one end of a connection to the other one."""

    def __init__(
        self,
        source: str,
        target: str,
        *,
        conditions: Callable[[], Conditions],
        chance: Random,
        struck: Counter[str],
    ) -> None:
        self.source = source
        self.target = target
        self._conditions = conditions
        self._chance = chance
        self._struck = struck
        self._pieces: deque[Piece] = deque()
        self._bytes = 0  # under way or unread
        self._sent_at = -math.inf  # when the last byte had left, on a slow way
        self._open = True
        self.discarding = False  # the reader takes what comes, and throws it away
        self.discarded_bytes = 0

    @property
    def has_reset(self) -> bool:
        """Whether a break is under way or has arrived."""
        return any(piece.kind is Kind.RESET for piece in self._pieces)

    def room(self, now: float) -> int:
        """How many bytes may be put now."""
        if self.discarding:
            while (head := self._head(now)) is not None and head.kind is Kind.DATA:
                self._drop()
        return max(0, self._conditions().buffer_bytes - self._bytes)

    def put(self, now: float, data: memoryview) -> int:
        """Send what there is room for; how many bytes that were."""
        count = self._drawn(min(len(data), self.room(now)))
        if count:
            self._bytes += count
            self._depart(now, Piece(Kind.DATA, memoryview(bytes(data[:count]))))
        return count

    def put_end(self, now: float) -> None:
        """Say that no more comes."""
        self._depart(now, Piece(Kind.END, memoryview(b"")))

    def put_reset(self, now: float) -> None:
        """Break the connection; what is under way or unread gets lost."""
        self._lose_data()
        self._depart(now, Piece(Kind.RESET, memoryview(b"")))

    def take(self, now: float, buffer: memoryview) -> int | None:
        """Put what has arrived into the buffer; how many bytes, 0 at the end, None where nothing has."""
        head = self._head(now)
        if head is None or head.kind is Kind.RESET:
            return None
        if head.kind is Kind.END:
            return 0
        wanted, taken = self._drawn(len(buffer)), 0
        while taken < wanted and (head := self._head(now)) is not None and head.kind is Kind.DATA:
            count = min(len(head.data), wanted - taken)
            buffer[taken : taken + count] = head.data[:count]
            head.data = head.data[count:]
            self._bytes -= count
            taken += count
            if not head.data:
                self._pieces.popleft()
        return taken

    def is_reset(self, now: float) -> bool:
        """Whether the break has arrived."""
        return any(piece.kind is Kind.RESET and piece.arrives_at <= now for piece in self._pieces)

    def is_ended(self, now: float) -> bool:
        """Whether the end has arrived, read or not what came before it."""
        return any(piece.kind is Kind.END and piece.arrives_at <= now for piece in self._pieces)

    def has_data(self, now: float) -> bool:
        """Whether bytes have arrived and stand unread."""
        head = self._head(now)
        return head is not None and head.kind is Kind.DATA

    def next_at(self, now: float) -> float:
        """When something more arrives; infinite where nothing will by itself."""
        return min((one.arrives_at for one in self._pieces if one.arrives_at > now), default=math.inf)

    def hold(self, now: float) -> None:
        """Cut: what has not arrived waits, and all that is put."""
        if self._open:
            self._open = False
            for piece in self._pieces:
                if piece.arrives_at > now:
                    piece.arrives_at = math.inf
                    self._struck["held up"] += 1

    def let_go(self, now: float) -> None:
        """Healed: what waited comes in its order, as if it was sent now."""
        if not self._open:
            self._open = True
            waiting = [piece for piece in self._pieces if piece.arrives_at == math.inf]
            for _ in waiting:
                self._pieces.pop()
            for piece in waiting:
                self._depart(now, piece)

    # --- within

    def _head(self, now: float) -> Piece | None:
        return self._pieces[0] if self._pieces and self._pieces[0].arrives_at <= now else None

    def _drop(self) -> None:
        count = len(self._pieces.popleft().data)
        self._bytes -= count
        self.discarded_bytes += count

    def _lose_data(self) -> None:
        self._struck["bytes lost by a reset"] += self._bytes
        self._pieces = deque(piece for piece in self._pieces if piece.kind is Kind.RESET)
        self._bytes = 0

    def _drawn(self, count: int) -> int:
        chunk_bytes_max = self._conditions().chunk_bytes_max
        if chunk_bytes_max is None or count == 0:
            return count
        return min(count, self._chance.randint(1, chunk_bytes_max))

    def _depart(self, now: float, piece: Piece) -> None:
        conditions = self._conditions()
        if self._open:
            before = self._pieces[-1].arrives_at if self._pieces else -math.inf
            self._sent_at = max(now, self._sent_at) + len(piece.data) / conditions.bytes_per_s
            jitter_s = self._chance.uniform(0, conditions.jitter_s_max)
            piece.arrives_at = max(before, self._sent_at + conditions.latency_s + jitter_s)
        else:
            self._struck["held up"] += 1
        self._pieces.append(piece)
