"""The position of a streamed read: a next offset for each partition, as Spark stores it in its checkpoints.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.client.ranges import LogBounds


class StreamPosition(NamedTuple):
    """The position in one partition: the next offset, with the id and the epoch of its log."""

    offset: int
    log: str
    epoch: int

    @classmethod
    def within(cls, bounds: LogBounds, offset: int) -> StreamPosition:
        """Return the position at an offset of a log."""
        return cls(offset, bounds.log_id.hex(), bounds.epoch)


def format_positions(positions: Mapping[int, StreamPosition]) -> dict[str, Any]:
    """Return the positions as Spark stores them, by the partition's number as text."""
    return {str(number): positions[number]._asdict() for number in sorted(positions)}


def parse_positions(stored: Mapping[str, Any]) -> dict[int, StreamPosition]:
    """Return the position of each partition.

    A checkpoint from before there were streams has the offset, the log and the epoch of partition 0.
    """
    if isinstance(stored.get("0"), int):
        stored = {"0": {"offset": stored["0"], "log": stored["log"], "epoch": stored["epoch"]}}
    return {int(number): StreamPosition(**at) for number, at in stored.items()}


def check_positions(
    stored: Mapping[str, Any], all_bounds: Mapping[int, LogBounds]
) -> dict[int, StreamPosition]:
    """Return the positions if the logs of these bounds still have them. Raises UsageError."""
    positions = parse_positions(stored)
    if positions.keys() != all_bounds.keys():
        read, had = (", ".join(map(str, sorted(numbers))) for numbers in (all_bounds, positions))
        raise UsageError(
            f"the checkpoint has the partitions {had:.60}, but this stream reads {read:.60}: give the "
            "options stream and partition that the stream was started with, or start another stream, with a "
            "new checkpointLocation"
        )
    for number, position in positions.items():
        _check_position(number if len(positions) > 1 else None, position, all_bounds[number])
    return positions


def _check_position(partition: int | None, position: StreamPosition, bounds: LogBounds) -> None:
    offset, log_id = position.offset, bounds.log_id.hex()
    subject = "the checkpoint" if partition is None else f"the checkpoint of partition {partition}"
    if position.log != log_id:
        raise UsageError(
            f"{subject} is at offset {offset} of log {position.log}, but the log here is {log_id}: give the "
            "url and the options stream and partition that the stream was started with, or start another "
            "stream, with a new checkpointLocation"
        )
    if offset < bounds.start_offset:
        raise UsageError(
            f"{subject} is at offset {offset}, but the log has removed the offsets before "
            f"{bounds.start_offset}, so the stream misses {bounds.start_offset - offset} of them: rebuild "
            f"its target up to offset {bounds.start_offset}, and start another stream, with a new "
            f"checkpointLocation and start={'earliest' if partition is not None else bounds.start_offset}"
        )
    if offset > bounds.end_offset:
        raise UsageError(
            f"{subject} is at offset {offset}, but the log ends at {bounds.end_offset}, because a disk "
            "failure lost the later deltas: start another stream, with a new checkpointLocation"
        )


def share_limit(available: Mapping[int, int], limit: int, turn: int) -> dict[int, int]:
    """Divide up to `limit` offsets between partitions: equally, but to none more than it has available.

    What cannot be divided goes to some of them; `turn` says with which one it begins, so that a caller who
    counts what it has got serves all in turn.
    """
    shares = dict.fromkeys(available, 0)
    waiting = sorted(number for number, count in available.items() if count)
    while waiting and limit >= len(waiting):
        each = min(limit // len(waiting), *(available[number] - shares[number] for number in waiting))
        for number in waiting:
            shares[number] += each
        limit -= each * len(waiting)
        waiting = [number for number in waiting if shares[number] < available[number]]
    for position in range(limit if waiting else 0):
        shares[waiting[(turn + position) % len(waiting)]] += 1
    return shares
