"""Reads the values of the data source's options from text, within their bounds.

Pure. A message names the option, its value, the allowed values and the fix; it never holds a token.
"""

from __future__ import annotations

import json

from delta_prop.client.addresses import PORT, parse_addresses
from delta_prop.client.partition_choice import STREAM_BYTES_MAX
from delta_prop.client.settings import ClientSettings
from delta_prop.directory.log_positions import LogPosition, parse_position
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.requests import TOKEN_BYTES_MAX
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX, PARTITION_BITS
from delta_prop_wire.topics import Topic

PRODUCER_BYTES_MAX = 240
"""Maximum length of a job's name, to which each part appends its number."""
PARTITIONS_MAX = 10_000
OFFSETS_PER_TRIGGER_MAX = 1 << 53
TOPICS_MAX = 256
SECONDS_MAX = 31_536_000
"""Maximum of any timeout: a year."""
HOST_BYTES_MAX = 253
PARTITION_MAX = (1 << PARTITION_BITS) - 1
_NAME_BYTES_MAX = {
    "namespace": NAMESPACE_BYTES_MAX,
    "producer": PRODUCER_BYTES_MAX,
    "stream": STREAM_BYTES_MAX,
}


# --- the service


def read_addresses(option: str, text: str) -> tuple[str, ...]:
    """Parse the addresses of one service, separated by commas."""
    addresses = [_read_address(option, one.strip()) for one in text.split(",")]
    try:
        return tuple(map(str, parse_addresses(addresses)))
    except UsageError as error:  # there are too many
        raise UsageError(f"{option}: {error}") from None


def _read_address(option: str, text: str) -> str:
    if "@" in text:
        raise UsageError(f"{option}: an address has no user and no password: give a token with option token")
    has_scheme = text.startswith("delta://")
    bare = text.removeprefix("delta://").rstrip("/")
    try:
        parse_addresses(bare)
        if has_scheme or bare.startswith("[") or ":" in bare:
            return bare
    except UsageError:
        pass
    raise UsageError(
        f"{option} {text!r:.80} is not an address: give host:port with a port from 1 to 65535, such as "
        f"localhost:{PORT} or delta://localhost:{PORT}; several of one service separated by commas"
    )


def read_token(name: str, text: str) -> str:
    """Check a token."""
    size = len(text.encode())
    if size > TOKEN_BYTES_MAX:
        raise UsageError(
            f"option {name}: {size:,} bytes, more than the limit of {TOKEN_BYTES_MAX:,}: give another token"
        )
    return text


def read_host(name: str, text: str) -> str:
    """Check the host name that the certificate must have."""
    is_invalid = any(letter.isspace() or letter in "/:" for letter in text)
    if is_invalid or text.startswith(".") or not 1 <= len(text.encode()) <= HOST_BYTES_MAX:
        raise UsageError(
            f"option {name} {text!r:.40}: give the name of a host as the server's certificate has it, 1 to "
            f"{HOST_BYTES_MAX} bytes, without a port"
        )
    return text


# --- amounts, times, positions


def read_flag(name: str, text: str) -> bool:
    """Parse a boolean."""
    if text.lower() not in ("true", "false"):
        raise UsageError(f"option {name} {text!r:.40}: give true or false")
    return text.lower() == "true"


def read_number(name: str, text: str, *, maximum: int, minimum: int = 1) -> int:
    """Parse a whole number from `minimum` up to `maximum`."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not minimum <= number <= maximum:
        raise UsageError(f"option {name} {text!r:.40}: give a whole number from {minimum} to {maximum:,}")
    return number


def read_seconds(name: str, text: str) -> float:
    """Parse a number of seconds, which may have a fraction.

    `silenceTimeoutSeconds` must exceed the interval between heartbeats.
    """
    seconds_min = ClientSettings().heartbeat_interval_s if name == "silenceTimeoutSeconds" else 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds_min < seconds <= SECONDS_MAX:
        reason = ", since a peer is silent between two heartbeats, and" if seconds_min else ","
        raise UsageError(
            f"option {name} {text!r:.40}: give a number of seconds above {seconds_min:g}{reason} "
            f"up to {SECONDS_MAX:,}"
        )
    return seconds


def read_position(name: str, text: str, *, now_us: int) -> LogPosition:
    """Parse a log position; a time before 1970 becomes 1970."""
    position = parse_position(f"option {name}", text, now_us)
    if position.time_us is None:
        return position
    return position._replace(time_us=max(position.time_us, 0))


# --- names


def read_topics(name: str, text: str) -> tuple[str, ...]:
    """Parse topics separated by commas, or a list in JSON for topics that contain commas."""
    names = text.split(",")
    if text.startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise UsageError(
                f"option {name} {text!r:.60} is not a JSON list ({error}): correct it or separate by commas"
            ) from None
    if not 1 <= len(names) <= TOPICS_MAX or not all(isinstance(topic, str) for topic in names):
        raise UsageError(f"option {name} {text!r:.60}: give 1 to {TOPICS_MAX} topics, such as ns:docs,c:news")
    try:
        return tuple(dict.fromkeys(str(Topic.parse(topic.strip())) for topic in names))
    except UsageError as error:
        raise UsageError(f"option {name}: {error}") from None


def read_name(name: str, text: str) -> str:
    """Check a namespace, the name of a job (`producer`), or that of a stream."""
    try:
        check_name(name, text, _NAME_BYTES_MAX[name])
    except InvalidDelta as error:
        raise UsageError(f"option {name} {text!r:.40}: {error.reason}") from None
    return text


def read_priority(name: str, text: str) -> Priority:
    """Parse a priority."""
    priority = Priority.__members__.get(text.upper())
    if priority is None:
        names = ", ".join(one.name.lower() for one in Priority)
        raise UsageError(f"option {name} {text!r:.40}: give {names}")
    return priority


def read_on_refused(name: str, text: str) -> bool:
    """Parse onRefused; return True if a refusal fails the job."""
    if text.lower() not in ("fail", "skip"):
        raise UsageError(f"option {name} {text!r:.40}: give fail or skip")
    return text.lower() == "fail"
