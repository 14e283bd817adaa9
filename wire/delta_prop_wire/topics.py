"""Topics, which subscribers ask for, as values, as text and as bytes.

A topic is not a log and implies no order; the router matches many topics at once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from delta_prop_wire.delta import Delta, Kind
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX, TOPIC_BYTES_MAX, VECTOR_ID_BYTES_MAX, ErrorCode

KIND_MAX = 63
"""The highest number of a kind; kinds without a name are written as numbers."""


class TopicKind(IntEnum):
    """The kinds of topics. Numbers are part of the protocol."""

    ALL = 0
    VECTOR_ID = 1
    NAMESPACE = 2
    DELTA_TYPE = 3
    CUSTOM = 4


class Topic(NamedTuple):
    """A topic: all deltas, a vector id, a namespace, a kind of operation, or a custom topic.

    Text: `*`, `v:ID`, `ns:NAME`, `op:create`, `c:NAME`. Bytes: the kind, then UTF-8 or, for a kind of
    operation, one byte.
    """

    kind: TopicKind
    value: str | int | None = None

    def __str__(self) -> str:
        if self.kind is TopicKind.ALL:
            return "*"
        value = kind_name(self.value) if isinstance(self.value, int) else self.value
        return f"{_PREFIXES[self.kind]}{value}"

    @classmethod
    def parse(cls, text: str) -> Topic:
        """Parse the text form. Raises UsageError with the known forms."""
        if text == "*":
            return ALL
        if not isinstance(text, str):
            raise UsageError(
                f'topic {text!r:.80} is of type {type(text).__name__}: give text, such as "ns:docs"'
            )
        for kind, prefix in _PREFIXES.items():
            if text.startswith(prefix):
                value: str | int | None = text[len(prefix) :]
                if kind is TopicKind.DELTA_TYPE:
                    value = kind_number(text[len(prefix) :])
                topic = cls(kind, value)
                fault = _find_fault(topic)
                if fault:
                    raise UsageError(f"topic {text!r:.80}: {fault}")
                return topic
        raise UsageError(
            f"topic {text!r:.80} is unknown: give * (all), v:VECTOR_ID, ns:NAMESPACE, op:KIND or c:CUSTOM"
        )

    def to_bytes(self) -> bytes:
        """Return the binary form, which Subscribe frames carry."""
        if isinstance(self.value, int):
            return bytes((self.kind, self.value))
        return bytes((self.kind,)) + (self.value or "").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Topic:
        """Read the binary form. Raises Refused (UNKNOWN_TOPIC)."""
        try:
            kind, rest = TopicKind(data[0]), data[1:]
            value: str | int = str(rest, "utf-8") if kind is not TopicKind.DELTA_TYPE else -1
        except (IndexError, ValueError) as error:
            raise _unknown_topic_error(
                data, f"{error}: send a kind from 0 to 4, then UTF-8 or one byte"
            ) from None
        if kind is TopicKind.ALL:
            fault, topic = "bytes after the kind of *: send the kind only" if rest else None, ALL
        else:
            topic = cls(kind, rest[0] if kind is TopicKind.DELTA_TYPE and len(rest) == 1 else value)
            fault = _find_fault(topic)
        if fault:
            raise _unknown_topic_error(data, fault)
        return topic

    def matches(self, delta: Delta) -> bool:
        """True if a subscriber of this topic gets the delta."""
        if self.kind is TopicKind.VECTOR_ID:
            return delta.vector_id == self.value
        if self.kind is TopicKind.NAMESPACE:
            return delta.namespace == self.value
        if self.kind is TopicKind.DELTA_TYPE:
            return delta.operation.kind == self.value
        return self.kind is TopicKind.ALL or self.value in delta.topics


ALL = Topic(TopicKind.ALL)

_PREFIXES = {
    TopicKind.VECTOR_ID: "v:",
    TopicKind.NAMESPACE: "ns:",
    TopicKind.DELTA_TYPE: "op:",
    TopicKind.CUSTOM: "c:",
}
_BYTES_MAX = {
    TopicKind.VECTOR_ID: VECTOR_ID_BYTES_MAX,
    TopicKind.NAMESPACE: NAMESPACE_BYTES_MAX,
    TopicKind.CUSTOM: TOPIC_BYTES_MAX,
}
_KIND_NAMES = {kind: kind.name.lower() for kind in Kind}
_KIND_NUMBERS = {name: int(kind) for kind, name in _KIND_NAMES.items()}


def kind_name(kind: int) -> str:
    """Return the name of an operation's kind, or its number in digits if it has none."""
    return _KIND_NAMES[Kind(kind)] if kind in _KIND_NAMES else str(kind)


def kind_number(name: str) -> int:
    """Return the number of a kind from its name, or from digits if it has no name; -1 for any other text."""
    if name in _KIND_NUMBERS:
        return _KIND_NUMBERS[name]
    has_no_name = name.isascii() and name.isdigit() and len(name) == 2
    return int(name) if has_no_name and len(Kind) <= int(name) <= KIND_MAX else -1


def kind_names() -> str:
    """Return the names of all known kinds, for messages."""
    return ", ".join(_KIND_NUMBERS)


def _find_fault(topic: Topic) -> str | None:
    if topic.kind is TopicKind.DELTA_TYPE:
        is_known = isinstance(topic.value, int) and 0 <= topic.value <= KIND_MAX
        return None if is_known else f"unknown kind: give one of {kind_names()}, or a number up to {KIND_MAX}"
    if topic.kind is TopicKind.ALL:
        return None
    try:
        size = len(str(topic.value).encode())
    except UnicodeEncodeError:
        return "it holds a lone surrogate (half a character): give text that UTF-8 can hold"
    bound = _BYTES_MAX[topic.kind]
    return None if 1 <= size <= bound else f"its name has {size} bytes: give 1 to {bound}"


def _unknown_topic_error(data: bytes, message: str) -> Refused:
    return Refused(ErrorCode.UNKNOWN_TOPIC, f"topic {bytes(data[:40])!r}: {message}", field="topics")
