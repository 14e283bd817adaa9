"""`token new`: creates a token, prints it once, and writes the lines by which a server recognizes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delta_prop.platform import system
from delta_prop.platform.dates import TIME_US_MAX, explain_bad_time, format_time, parse_span_us, parse_time
from delta_prop.server.tokens import (
    RIGHTS,
    TOKEN_RANDOM_BYTES,
    TokenDefaults,
    digest_of,
    make_token,
    parse_tokens,
)
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0
_DIGITS_MAX = 20
_OPTIONS = {"name": "NAME", "namespaces": "--namespace", "streams": "--stream", "operations": "--operation"}


def create_token(options: Namespace) -> int:
    """Write a table for the token file to standard output, the token itself to standard error.

    Raises UsageError.
    """
    name, rights = options.name, _read_rights(options)
    token = make_token(system.draw(TOKEN_RANDOM_BYTES))
    table = {"name": name, "sha256": digest_of(token).hex()} | rights
    lines = [f"{key} = {_to_toml(value)}" for key, value in table.items() if value not in (None, False, [])]
    text = "\n".join(["[[token]]", *lines])
    _check_rights(name, rights)
    try:
        parse_tokens(text, TokenDefaults())
    except UsageError as error:
        raise _with_option_name(error) from None
    if options.json:
        system.put(json.dumps({"name": name, "token": token, "toml": text}))
        return OK
    system.put(text + "\n")
    system.note(f"the token of {name}, shown this once: {token}")
    return OK


def _read_rights(options: Namespace) -> dict[str, Any]:
    """Return the table's keys and values; a key that was not given has an empty value."""
    rights = {right: getattr(options, right) for right in RIGHTS}
    rights |= {"namespaces": options.namespace, "streams": options.stream, "operations": options.operation}
    for key in ("rate", "burst"):
        text = getattr(options, key)
        rights[key] = None if text is None else Literal(_parse_number(f"--{key}", text))
    rights["expires"] = None if options.expires is None else Literal(_parse_expiry(options.expires))
    return rights


def _check_rights(name: str, rights: Mapping[str, Any]) -> None:
    """Check the combination of options by the rules of the token file, with errors that name options."""
    given = {key for key, value in rights.items() if value}
    if not given & {*RIGHTS}:
        raise UsageError(
            f"token {name!r:.80}: it may do nothing: give --publish, --subscribe, --forward, --admin or "
            "--manage"
        )
    is_unrestricted = (
        {"publish", "namespaces"} <= given and rights["namespaces"] == ["*"] and "operations" not in given
    )
    if "forward" in given and not is_unrestricted:
        raise UsageError(
            f"--forward: {name!r:.80} would forward full logs: give --publish and --namespace '*', and no "
            "--operation"
        )
    if given & {"publish", "subscribe"} and "namespaces" not in given:
        raise UsageError(
            "--namespace: give the namespaces that it may use, like --namespace docs --namespace 'img-*', or "
            "--namespace '*' for all"
        )


def _with_option_name(error: UsageError) -> UsageError:
    """Replace the key of the token file in an error by the option for it."""
    path, _, problem = str(error).partition(": ")
    if not path.startswith("token[0]."):
        return error
    key = path.removeprefix("token[0].").partition("[")[0]
    return UsageError(f"{_OPTIONS.get(key, f'--{key}')}: {problem}")


def _parse_expiry(text: str) -> str:
    """Return a token's expiry as TOML, from a time or a span from now on. Raises UsageError."""
    now_us = system.wall_us()
    span_us = parse_span_us(text)
    time_us = parse_time(text, now_us) if span_us is None else now_us + span_us
    if time_us is None or time_us > TIME_US_MAX:
        raise UsageError(
            f"--expires {text!r:.60}: {explain_bad_time(text)}give a time like 2027-01-31T00:00:00Z, or "
            "how long from now on, like 30d"
        )
    if time_us <= now_us:
        raise UsageError(
            f"--expires {text!r:.60}: it has passed (now: {format_time(now_us)}): give a later time"
        )
    return format_time(time_us)


def _parse_number(option: str, text: str) -> str:
    """Return a number as TOML; the token file's rules check its range. Raises UsageError."""
    with suppress(ValueError):
        if len(text) <= _DIGITS_MAX:
            return str(int(text))
    with suppress(ValueError):
        return str(float(text))
    raise UsageError(f"{option} {text!r:.60} is not a number: give one like 100")


class Literal(str):
    """A value that TOML writes without quotes: a number, a time."""

    __slots__ = ()


def _to_toml(value: object) -> str:
    # JSON writes texts, lists of texts and true as TOML does.
    return value if isinstance(value, Literal) else json.dumps(value, ensure_ascii=False)
