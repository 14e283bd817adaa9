"""The file of tokens: TOML in, rights out; and how a new token is made.

Pure. The file holds hashes alone, so who reads it cannot connect. A mistake refuses the whole file, and is
named by the key that it stands at.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from math import inf, isnan
from typing import TYPE_CHECKING, Any, NoReturn

from delta_prop.server.grants import ALL_KINDS, ANONYMOUS, Grant
from delta_prop.toml_text import parse_toml
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX
from delta_prop_wire.topics import kind_names, kind_number

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS_MAX = 1_000
"""Each is compared at each hello, so that the time taken tells nothing."""
FILE_BYTES_MAX = 1024 * 1024
TOKEN_CHARS_MAX = 1_024
TOKEN_RANDOM_BYTES = 32
SECRETS_MAX = 10
"""Of one token; two are needed while one takes the other's place."""
NAMES_MAX = 1_000
BURST_S = 0.1
"""Where a token names its rate alone, it may send so much of it at once."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "dp_"
_RIGHTS = ("publish", "subscribe", "forward", "admin")
_KEYS = (
    "name",
    "sha256",
    *_RIGHTS,
    "namespaces",
    "operations",
    "rate",
    "burst",
    "vector_rate",
    "expires",
)


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of one secret: its hash, and the rights that it gives."""

    digest: bytes = field(repr=False)
    grant: Grant


@dataclass(frozen=True, slots=True)
class Usual:
    """What holds where a token says nothing of its rate."""

    rate: float = 1_000.0
    burst: int = 100


def digest_of(token: str) -> bytes:
    """What is kept of a token, and compared."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def token_from(drawn: bytes) -> str:
    """A token made of random bytes, in letters that need no quoting anywhere."""
    assert len(drawn) == TOKEN_RANDOM_BYTES
    return _PREFIX + base64.urlsafe_b64encode(drawn).rstrip(b"=").decode()


def parse_tokens(text: str, usual: Usual) -> tuple[Token, ...]:
    """All tokens of a file. Raises UsageError with the path of the key that is wrong."""
    if len(text) > FILE_BYTES_MAX:
        raise UsageError(f"the file of tokens has {len(text)} characters: {FILE_BYTES_MAX} at most")
    whole = parse_toml(text, "the file of tokens")
    _check_keys("", whole, ("token",))
    tables = whole.get("token", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise UsageError("token: begin each token with a line [[token]]")
    if not 1 <= len(tables) <= TOKENS_MAX:
        raise UsageError(f"the file of tokens has {len(tables)} tables [[token]]: give 1 to {TOKENS_MAX}")
    grants = [_grant(f"token[{place}].", table, usual) for place, table in enumerate(tables)]
    _check_distinct({f"token[{place}].name": grant.name for place, grant in enumerate(grants)})
    digests = [_digests(f"token[{place}].", table) for place, table in enumerate(tables)]
    _check_distinct({path: digest for one in digests for path, digest in one.items()})
    # A grant of its own for each secret, so that connections end with theirs alone.
    return tuple(
        Token(digest, replace(grant))
        for grant, one in zip(grants, digests, strict=True)
        for digest in one.values()
    )


def _grant(path: str, table: Mapping[str, Any], usual: Usual) -> Grant:
    _check_keys(path, table, _KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == ANONYMOUS:
        _wrong(path, "name", name, "give 1 to 64 letters, digits, '.', '_' and '-'")
    rights = {right: table.get(right, False) for right in _RIGHTS}
    for right, given in rights.items():
        if not isinstance(given, bool):
            _wrong(path, right, given, "give true or false")
    if not any(rights.values()):
        raise UsageError(f"{path}publish: {name!r} may do nothing: give {', '.join(_RIGHTS)} = true")
    if rights["forward"] and (
        not rights["publish"] or table.get("namespaces") != ["*"] or "operations" in table
    ):
        raise UsageError(
            f"{path}forward: {name!r} would hand on whole logs: give publish = true and namespaces = ["
            '"*"], and no operations'
        )
    rate = _number(path, table, "rate", usual.rate, zero=False)
    burst = _burst(path, table, rate, usual)
    return Grant(
        name=name,
        **rights,
        namespaces=_namespaces(path, table, needed=rights["publish"] or rights["subscribe"]),
        kinds_mask=_kinds_mask(path, table),
        rate=rate,
        burst=burst,
        vector_rate=_number(path, table, "vector_rate", inf, zero=True) if "vector_rate" in table else None,
        expires_at=_expires_at(path, table),
    )


def _digests(path: str, table: Mapping[str, Any]) -> dict[str, bytes]:
    """The hashes of a token, by their paths."""
    given = table.get("sha256")
    many = given if isinstance(given, list) else [given]
    if not 1 <= len(many) <= SECRETS_MAX:
        raise UsageError(f"{path}sha256: {len(many)} hashes: give 1 to {SECRETS_MAX}")
    found = {}
    for place, one in enumerate(many):
        at = f"{path}sha256[{place}]" if many is given else f"{path}sha256"
        if not isinstance(one, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", one):
            told = "nothing" if one is None else "something else"  # it may be the token itself
            raise UsageError(
                f"{at}: {told} where 64 hexadecimal digits belong: give the SHA-256 of the token, as "
                "`delta-prop token new` prints it"
            )
        found[at] = bytes.fromhex(one)
    return found


def _namespaces(path: str, table: Mapping[str, Any], *, needed: bool) -> tuple[str, ...] | None:
    given = table.get("namespaces")
    if given is None:
        if needed:
            raise UsageError(
                f'{path}namespaces: give the names that it is for, like ["docs", "img-*"], or ["*"]'
            )
        return ()
    if not isinstance(given, list) or len(given) > NAMES_MAX:
        _wrong(path, "namespaces", given, f"give a list of up to {NAMES_MAX} names")
    for place, name in enumerate(given):
        at = f"namespaces[{place}]"
        if not isinstance(name, str) or not name or len(name.encode()) > NAMESPACE_BYTES_MAX + 1:
            _wrong(path, at, name, f"give a name of 1 to {NAMESPACE_BYTES_MAX} bytes")
        if "*" in name[:-1]:
            _wrong(path, at, name, "a * stands at the end alone, for whatever follows")
    return None if "*" in given else tuple(given)


def _kinds_mask(path: str, table: Mapping[str, Any]) -> int:
    given = table.get("operations")
    if given is None:
        return ALL_KINDS
    if not isinstance(given, list):
        _wrong(path, "operations", given, f"give a list of {kind_names()}")
    mask = 0
    for place, name in enumerate(given):
        kind = kind_number(name) if isinstance(name, str) else -1
        if kind < 0:
            _wrong(path, f"operations[{place}]", name, f"give one of {kind_names()}")
        mask |= 1 << kind
    return mask


def _burst(path: str, table: Mapping[str, Any], rate: float, usual: Usual) -> int:
    given = table.get("burst")
    if given is None:
        return usual.burst if rate == inf else max(usual.burst, int(rate * BURST_S))
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        _wrong(path, "burst", given, "give a whole number of deltas from 1")
    return int(given)


def _number(path: str, table: Mapping[str, Any], key: str, usual: float, *, zero: bool) -> float:
    given = table.get(key, usual)
    least = "from 0 (no bound)" if zero else "above 0, or inf for no bound"
    if isinstance(given, bool) or not isinstance(given, int | float) or isnan(given):
        _wrong(path, key, given, f"give deltas a second, {least}")
    if given < 0 or (given == 0 and not zero):
        _wrong(path, key, given, f"give deltas a second, {least}")
    return float(given)


def _expires_at(path: str, table: Mapping[str, Any]) -> int | None:
    given = table.get("expires")
    if given is None:
        return None
    if not isinstance(given, datetime) or given.tzinfo is None:
        _wrong(path, "expires", given, "give a time with its zone and without quotes: 2027-01-31T00:00:00Z")
    return int(given.timestamp() * 1_000_000)


def _check_keys(path: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1)
            cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{path}{key}: unknown key; {cure}")


def _check_distinct(values: Mapping[str, object]) -> None:
    """By their paths."""
    first: dict[object, str] = {}
    for path, value in values.items():
        if first.setdefault(value, path) != path:
            raise UsageError(f"{path}: the same as {first[value]}")


def _wrong(path: str, key: str, given: object, cure: str) -> NoReturn:
    told = "nothing is given" if given is None else f"{given!r:.80}"
    raise UsageError(f"{path}{key}: {told}: {cure}")
