"""The numbers of the 0xD3 protocol: versions, sizes, limits, codes.

Holds constants only: each number that two modules must agree on, once.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = 0xD3
VERSION = 0x01
HEADER_BYTES = 16
STAMP_BYTES = 48
BODY_HEADER_BYTES = 64
BODY_VERSION = 1
CRC_BYTES = 4
ALIGNMENT = 8

FRAME_PAYLOAD_BYTES_MAX = 16 * 1024 * 1024
DELTA_BYTES_MAX = 1024 * 1024
VECTOR_ID_BYTES_MAX = 512
NAMESPACE_BYTES_MAX = 255
TOPIC_BYTES_MAX = 255
TRANSFORM_NAME_BYTES_MAX = 255
TOPICS_PER_DELTA_MAX = 16
PARENTS_PER_DELTA_MAX = 64
CLOCK_ENTRIES_MAX = 1024
METADATA_BYTES_MAX = 64 * 1024
METADATA_DEPTH_MAX = 32
DIMENSION_MAX = 65_536
BATCH_ROWS_MAX = 65_536

DELTA_ID_BYTES = 16
PRODUCER_ID_BITS = 44
PARTITION_BITS = 16
LANE_BITS = 4
COUNTER_MAX = (1 << 63) - 1
"""Counters and Lamport numbers stay below 2**63, so that every store can hold them as signed integers."""
UNKNOWN_OFFSET = COUNTER_MAX
"""The offset acknowledged for a duplicate whose original offset is no longer known."""


class FrameType(IntEnum):
    """The eight frames."""

    DELTA = 0
    BATCH = 1
    ACK = 2
    NACK = 3
    BACKPRESSURE = 4
    HEARTBEAT = 5
    SUBSCRIBE = 6
    UNSUBSCRIBE = 7


class Flag(IntEnum):
    """Bits of the header's flags byte; bits 4 to 7 are reserved and sent as 0."""

    ACK_WANTED = 1
    HIGH_PRIORITY = 2
    COMPRESSED = 4
    BATCHED = 8


class Attribute(IntEnum):
    """Bits of a body's attributes; bits 10-11 hold the ack level, 12-13 the priority, 14-15 are 0.

    TRANSACTIONAL is stored and has no meaning yet.
    """

    TRANSACTIONAL = 1 << 0
    CONTROL = 1 << 1
    IDS = 1 << 2
    PARENTS = 1 << 3
    CLOCK = 1 << 4
    MIXED_KINDS = 1 << 5
    MIXED_NAMESPACES = 1 << 6
    ROW_OFFSETS = 1 << 7
    COUNTER_GAPS = 1 << 8
    STATE_ROWS = 1 << 9


ACK_LEVEL_SHIFT = 10
PRIORITY_SHIFT = 12


class ErrorCode(IntEnum):
    """The reason for a refusal. Names and numbers are part of the protocol.

    A number without a name here is still a code, since a newer peer may send it: `CODE_999`.
    """

    BAD_FRAME = 1
    UNSUPPORTED_VERSION = 2
    UNSUPPORTED_FLAG = 3
    TOO_LARGE = 4
    CHECKSUM = 5
    UNAUTHORIZED = 6
    UNKNOWN_TOPIC = 7
    QUEUE_FULL = 8
    RATE_LIMITED = 9
    DEP_TIMEOUT = 10
    FENCED = 11
    CURSOR_TOO_OLD = 12
    PROCESSING_FAILED = 13
    INVALID_DELTA = 14
    SHUTTING_DOWN = 15
    DOT_REUSED = 16
    UNKNOWN_ORIGIN = 17
    CONFLICT = 18
    PENDING_FULL = 19
    LOG_FULL = 20
    LOG_FAILED = 21
    LEVEL_UNAVAILABLE = 22
    OVERLAP = 23
    BAD_REQUEST = 24
    UNKNOWN_JOB = 25
    JOB_DECIDED = 26
    ID_REUSED = 27
    OUTCOME_UNKNOWN = 28
    NOT_LEADER = 29
    NO_QUORUM = 30
    WRONG_PARTITION = 31
    UNKNOWN_STREAM = 32
    STALE_GENERATION = 33
    STREAM_MOVED = 34
    QUOTA_EXCEEDED = 35

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode | None:
        if type(value) is not int or not 1 <= value < 1 << 16:
            return None
        unknown = int.__new__(cls, value)
        unknown._name_, unknown._value_ = f"CODE_{value}", value
        return unknown


FINAL = frozenset(
    {
        ErrorCode.TOO_LARGE,
        ErrorCode.UNAUTHORIZED,
        ErrorCode.INVALID_DELTA,
        ErrorCode.CONFLICT,
        ErrorCode.LEVEL_UNAVAILABLE,
        ErrorCode.ID_REUSED,
    }
)
"""Codes of final refusals: the dot is used up, and a corrected delta takes a new dot."""

RETRYABLE = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.RATE_LIMITED,
        ErrorCode.DEP_TIMEOUT,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.PENDING_FULL,
        ErrorCode.LOG_FULL,
        ErrorCode.LOG_FAILED,
        ErrorCode.OVERLAP,
        ErrorCode.NOT_LEADER,
        ErrorCode.NO_QUORUM,
        ErrorCode.WRONG_PARTITION,
        ErrorCode.UNKNOWN_STREAM,
        ErrorCode.STALE_GENERATION,
        ErrorCode.STREAM_MOVED,
        ErrorCode.QUOTA_EXCEEDED,
    }
)
"""Codes of retryable refusals: the dot stays open, and the delta is sent again under it, in order."""
