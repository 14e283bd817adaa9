"""The partition of a message that needs none of its own: one partition for a while, then another one.

Pure: the time and the random numbers are arguments. Calls that are close together go to one partition, and so
share its batches; over a longer time each partition gets its share.
"""

from __future__ import annotations

from collections.abc import Collection

from delta_prop.platform.ports import Randomness
from delta_prop_wire.bounds import check_integer
from delta_prop_wire.murmur import murmur2
from delta_prop_wire.spec import COUNTER_MAX

STICKY_MESSAGES_MAX = 16_384
STICKY_S_MAX = 0.1
_HASH_MASK = 0x7FFFFFFF


class StickyPartition:
    """Stays at one of `count` partitions for STICKY_MESSAGES_MAX messages or STICKY_S_MAX, then moves.

    In each round every partition has one turn, in an order drawn at random. A call is never split, so the
    last call of a turn may exceed the number of messages.
    """

    __slots__ = ("_count", "_current", "_messages", "_randomness", "_round", "_since")

    def __init__(self, count: int, randomness: Randomness) -> None:
        self._count, self._randomness = count, randomness
        self._round: list[int] = []  # the partitions that still have a turn, in reverse order
        self._current: int | None = None
        self._messages, self._since = 0, 0.0

    def has_ended(self, now: float) -> bool:
        """True if the turn of the current partition is over: the next call needs a `move` first."""
        return (
            self._current is None
            or self._messages >= STICKY_MESSAGES_MAX
            or now - self._since >= STICKY_S_MAX
        )

    def move(self, now: float, blocked: Collection[int] = ()) -> None:
        """Begin the turn of the next partition. Those that are blocked lose their turn, unless all are."""
        partition = self._take_turn()
        while partition in blocked and len(blocked) < self._count:
            partition = self._take_turn()
        self._current, self._messages, self._since = partition, 0, now

    def take(self, message_count: int) -> int:
        """Return the current partition, for a call with this number of messages."""
        assert self._current is not None
        self._messages += message_count
        return self._current

    def _take_turn(self) -> int:
        if not self._round:
            self._round = self._draw_round()
        return self._round.pop()

    def _draw_round(self) -> list[int]:
        """Return the partitions in random order; the current one does not have its next turn first."""
        partitions = list(range(self._count))
        for position in range(self._count - 1, 0, -1):
            other = int(self._randomness.random() * (position + 1))
            partitions[position], partitions[other] = partitions[other], partitions[position]
        if partitions[-1] == self._current:
            partitions[0], partitions[-1] = partitions[-1], partitions[0]
        return partitions


def partition_of_counter(counter: int, partition_count: int) -> int:
    """Return the partition of a message that its producer numbers: a repeated import finds it there again.

    murmur2 of the counter's 8 bytes (little-endian), masked to 31 bits, modulo the number of partitions.
    """
    check_integer("counter", counter, COUNTER_MAX)
    return (murmur2(counter.to_bytes(8, "little")) & _HASH_MASK) % partition_count
