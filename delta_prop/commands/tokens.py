"""`token new`: draws a token, which is shown this once, and writes the lines by which a server knows it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop.dates import TIME_US_MAX, shown_time, span_us, time_fault, time_of
from delta_prop.server.tokens import TOKEN_RANDOM_BYTES, Usual, digest_of, parse_tokens, token_from
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

OK = 0
_DIGITS_MAX = 20
_OPTIONS = {"name": "NAME", "namespaces": "--namespace", "operations": "--operation"}


def new(name: str, rights: Mapping[str, Any], *, as_json: bool) -> int:
    """Write a table for the file of tokens to standard output, the token itself to standard error.

    `rights`: keys and values of the table, None for what is not said. Raises UsageError.
    """
    token = token_from(edge.draw(TOKEN_RANDOM_BYTES))
    table = {"name": name, "sha256": digest_of(token).hex()} | dict(rights)
    lines = [f"{key} = {_toml(value)}" for key, value in table.items() if value not in (None, False, [])]
    text = "\n".join(["[[token]]", *lines])
    _check_rights(name, rights)
    try:
        parse_tokens(text, Usual())
    except UsageError as error:
        raise _of_options(error) from None
    if as_json:
        edge.put(json.dumps({"name": name, "token": token, "toml": text}))
        return OK
    edge.put(text + "\n")
    edge.note(f"the token of {name}, shown this once: {token}")
    return OK


def _check_rights(name: str, rights: Mapping[str, Any]) -> None:
    """Check what options must stand together: as the file's rules do, in the words of options."""
    given = {key for key, value in rights.items() if value}
    if not given & {"publish", "subscribe", "forward", "admin"}:
        raise UsageError(
            f"token {name!r:.80} may do nothing: give --publish, --subscribe, --forward or --admin"
        )
    whole = {"publish", "namespaces"} <= given and rights["namespaces"] == ["*"] and "operations" not in given
    if "forward" in given and not whole:
        raise UsageError(
            f"--forward: {name!r:.80} would hand on whole logs: give --publish and --namespace '*', and no "
            "--operation"
        )
    if given & {"publish", "subscribe"} and "namespaces" not in given:
        raise UsageError(
            "--namespace: give the names that it is for, as --namespace docs --namespace 'img-*', or "
            "--namespace '*' for all"
        )


def _of_options(error: UsageError) -> UsageError:
    """Name the option in place of the key that it gives in the file."""
    path, _, what = str(error).partition(": ")
    key = path.removeprefix("token[0].").partition("[")[0]
    return UsageError(f"{_OPTIONS.get(key, f'--{key}')}: {what}") if path.startswith("token[0].") else error


def expiry(text: str) -> str:
    """When a token expires, as TOML writes it: a time, or how long from now on. Raises UsageError."""
    now_us = edge.wall_us()
    ahead_us = span_us(text)
    time_us = time_of(text, now_us) if ahead_us is None else now_us + ahead_us
    if time_us is None or time_us > TIME_US_MAX:
        raise UsageError(
            f"--expires {text!r:.60}: {time_fault(text)}give a time like 2027-01-31T00:00:00Z, or "
            "how long from now on, like 30d"
        )
    if time_us <= now_us:
        raise UsageError(
            f"--expires {text!r:.60}: has passed, as it is {shown_time(now_us)} now: give a later time"
        )
    return shown_time(time_us)


def number(option: str, text: str) -> str:
    """A number as TOML writes it; which ones are allowed the rules of the file say. Raises UsageError."""
    with suppress(ValueError):
        if len(text) <= _DIGITS_MAX:
            return str(int(text))
    with suppress(ValueError):
        return str(float(text))
    raise UsageError(f"{option} {text!r:.60} is not a number: give one like 100")


class Literal(str):
    """Return a value as TOML writes it without quotes: a number, a time."""

    __slots__ = ()


def _toml(value: object) -> str:
    # JSON writes texts, lists of texts and true as TOML does.
    return value if isinstance(value, Literal) else json.dumps(value, ensure_ascii=False)
