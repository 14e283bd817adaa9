"""Values of the data source's options, each read from its text and held to its bound.

Pure. A message names the option, what was given, what is allowed and what to do; a token is never told.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from delta_prop.client.addresses import PORT, parse_addresses
from delta_prop.client.settings import ClientSettings
from delta_prop.commands.places import At, parse_at
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.requests import TOKEN_BYTES_MAX
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Callable

PRODUCER_BYTES_MAX = 240
"""Of a name to which parts add their numbers."""
PARTITIONS_MAX = 10_000
ROWS_MAX = 1 << 53
TOPICS_MAX = 256
SECONDS_MAX = 31_536_000
"""A year."""
HOST_BYTES_MAX = 253


# --- where to, and who


def addresses(option: str, text: str) -> tuple[str, ...]:
    """The addresses of one service, with commas between."""
    each = [_address(option, one.strip()) for one in text.split(",")]
    try:
        return tuple(map(str, parse_addresses(each)))
    except UsageError as error:  # there are too many
        raise UsageError(f"{option}: {error}") from None


def _address(option: str, text: str) -> str:
    """One of them, without what stands before and behind host and port."""
    if "@" in text:
        raise UsageError(f"{option}: an address has no user and no password: give a token by option token")
    named = text.startswith("delta://")
    bare = text.removeprefix("delta://").rstrip("/")
    try:
        parse_addresses(bare)
        if named or bare.startswith("[") or ":" in bare:
            return bare
    except UsageError:
        pass
    raise UsageError(
        f"{option}: {text!r:.80} is no address: give host:port with a port from 1 to 65535, such as "
        f"localhost:{PORT} or delta://localhost:{PORT}; several of one service with commas between"
    )


def token(text: str) -> str:
    """Who somebody is."""
    size = len(text.encode())
    if size > TOKEN_BYTES_MAX:
        raise UsageError(f"option token: {size:,} bytes; a token has up to {TOKEN_BYTES_MAX:,}: give another")
    return text


def host(text: str) -> str:
    """The name in a certificate."""
    odd = any(letter.isspace() or letter in "/:" for letter in text)
    if odd or text.startswith(".") or not 1 <= len(text.encode()) <= HOST_BYTES_MAX:
        raise UsageError(
            f"option tlsName {text!r:.40}: give the name of a host as the server's certificate has it, 1 to "
            f"{HOST_BYTES_MAX} bytes, without a port"
        )
    return text


# --- how much, how long, from where


def flag(name: str) -> Callable[[str], bool]:
    """Yes or no."""

    def read(text: str) -> bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"option {name} {text!r:.40}: give true or false")
        return text.lower() == "true"

    return read


def number(name: str, most: int) -> Callable[[str], int]:
    """A whole number from 1 on."""

    def read(text: str) -> int:
        found = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        if not 1 <= found <= most:
            raise UsageError(f"option {name} {text!r:.40}: give a whole number from 1 to {most:,}")
        return found

    return read


def seconds(name: str) -> Callable[[str], float]:
    """A time, which may have a fraction."""
    beat = ClientSettings().heartbeat_s if name == "silenceSecondsMax" else 0.0

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not beat < found <= SECONDS_MAX:
            why = ", as it hears nothing between two heartbeats" * bool(beat)
            raise UsageError(
                f"option {name} {text!r:.40}: give a number of seconds above {beat:g}, up to "
                f"{SECONDS_MAX:,}{why}"
            )
        return found

    return read


def place(name: str, now_us: int) -> Callable[[str], At]:
    """A place in the log; a time before the first one there is, is that one."""

    def read(text: str) -> At:
        at = parse_at(f"option {name}", text, now_us)
        return at if at.time_us is None else at._replace(time_us=max(at.time_us, 0))

    return read


# --- names


def topics(text: str) -> tuple[str, ...]:
    """Topics with commas between, or as a list in JSON where one has a comma in it."""
    names = text.split(",")
    if text.startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise UsageError(f"option topics {text!r:.60} is no list in JSON: {error}") from None
    if not 1 <= len(names) <= TOPICS_MAX or not all(isinstance(name, str) for name in names):
        raise UsageError(f"option topics {text!r:.60}: give 1 to {TOPICS_MAX} topics, such as ns:docs,c:news")
    try:
        return tuple(dict.fromkeys(str(Topic.parse(name.strip())) for name in names))
    except UsageError as error:
        raise UsageError(f"option topics: {error}") from None


def namespace(text: str) -> str:
    """The name of a namespace."""
    return _name("namespace", text, NAMESPACE_BYTES_MAX)


def producer(text: str) -> str:
    """The name of a job."""
    return _name("producer", text, PRODUCER_BYTES_MAX)


def _name(option: str, text: str, bytes_max: int) -> str:
    try:
        check_name(option, text, bytes_max)
    except InvalidDelta as error:
        raise UsageError(f"option {option} {text!r:.40}: {error.reason}") from None
    return text


def priority(text: str) -> Priority:
    """How urgent."""
    found = Priority.__members__.get(text.upper())
    if found is None:
        names = ", ".join(one.name.lower() for one in Priority)
        raise UsageError(f"option priority {text!r:.40}: give {names}")
    return found


def refused(text: str) -> bool:
    """Whether a refusal fails a job."""
    if text.lower() not in ("raise", "allow"):
        raise UsageError(f"option refused {text!r:.40}: give raise or allow")
    return text.lower() == "raise"
