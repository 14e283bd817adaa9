"""The token file: parses TOML into permissions, and creates new tokens.

Pure. The file holds only hashes, so that whoever reads it cannot connect. A file with a mistake is refused as
a whole, and the error names the key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from math import inf, isnan
from typing import Any, NoReturn

from delta_prop.platform.toml_text import parse_toml
from delta_prop.server.permissions import ALL_KINDS, ANONYMOUS, Permissions
from delta_prop.server.quotas import LIMIT_NAMES, Limits
from delta_prop_broker.catalogue.stream import check_stream_name
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import NAMESPACE_BYTES_MAX
from delta_prop_wire.topics import kind_names, kind_number

TOKENS_MAX = 1_000
"""Maximum tokens in a file; each hello compares all of them, so that the time taken reveals nothing."""
FILE_BYTES_MAX = 1024 * 1024
TOKEN_CHARS_MAX = 1_024
TOKEN_RANDOM_BYTES = 32
SECRETS_MAX = 10
"""Maximum hashes per token; two are needed while a new secret replaces the old one."""
NAMES_MAX = 1_000
"""Maximum namespaces, and streams, per token."""
BURST_S = 0.1
"""A token without `burst` may send at once what its rate allows in this many seconds."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "dp_"
RIGHTS = ("publish", "subscribe", "forward", "admin", "manage")
_LISTS, _RATES = ("namespaces", "streams", "operations"), ("rate", "burst", "vector_rate")
_KEYS = ("name", "sha256", *RIGHTS, *_LISTS, *_RATES, *LIMIT_NAMES, "connections", "expires")


@dataclass(frozen=True, slots=True)
class Token:
    """The hash of one secret, and the permissions that it gives."""

    digest: bytes = field(repr=False)
    permissions: Permissions


@dataclass(frozen=True, slots=True)
class TokenDefaults:
    """The rate and burst of a token that names none."""

    rate: float = 1_000.0
    burst: int = 100


def digest_of(token: str) -> bytes:
    """Return the hash of a token, which is stored and compared."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def make_token(random_bytes: bytes) -> str:
    """Return a token made of random bytes, in characters that need no quoting anywhere."""
    assert len(random_bytes) == TOKEN_RANDOM_BYTES
    return _PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


def parse_tokens(text: str, defaults: TokenDefaults) -> tuple[Token, ...]:
    """Return all tokens of a file. Raises UsageError with the path of the wrong key."""
    if len(text) > FILE_BYTES_MAX:
        raise UsageError(f"the token file has {len(text)} characters: remove some: up to {FILE_BYTES_MAX}")
    document = parse_toml(text, "the token file")
    _check_keys("", document, ("token",))
    tables = document.get("token", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError("token: begin each token with a line [[token]]")
    if not 1 <= len(tables) <= TOKENS_MAX:
        raise UsageError(f"the token file has {len(tables)} tables [[token]]: give 1 to {TOKENS_MAX}")
    permissions_list = [
        _parse_permissions(f"token[{index}].", table, defaults) for index, table in enumerate(tables)
    ]
    _check_distinct(
        {f"token[{index}].name": permissions.name for index, permissions in enumerate(permissions_list)}
    )
    digests = [_parse_digests(f"token[{index}].", table) for index, table in enumerate(tables)]
    _check_distinct({path: digest for by_path in digests for path, digest in by_path.items()})
    # Each secret has a copy of the permissions, so that its removal ends only its own connections.
    return tuple(
        Token(digest, replace(permissions))
        for permissions, by_path in zip(permissions_list, digests, strict=True)
        for digest in by_path.values()
    )


def _parse_permissions(path: str, table: Mapping[str, Any], defaults: TokenDefaults) -> Permissions:
    _check_keys(path, table, _KEYS)
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == ANONYMOUS:
        _raise_invalid(path, "name", name, "give 1 to 64 letters, digits, '.', '_' and '-'")
    rights = {right: table.get(right, False) for right in RIGHTS}
    for right, given in rights.items():
        if not isinstance(given, bool):
            _raise_invalid(path, right, given, "give true or false")
    if not any(rights.values()):
        raise UsageError(f"{path}publish: {name!r} has no right: give {', '.join(RIGHTS)} = true")
    if rights["forward"] and (
        not rights["publish"] or table.get("namespaces") != ["*"] or "operations" in table
    ):
        raise UsageError(
            f"{path}forward: {name!r} would forward complete logs: give publish = true and namespaces = ["
            '"*"], and no operations'
        )
    rate = _parse_rate(path, table, "rate", defaults.rate, allows_zero=False)
    burst = _parse_burst(path, table, rate, defaults)
    return Permissions(
        name=name,
        **rights,
        namespaces=_parse_namespaces(path, table, is_needed=rights["publish"] or rights["subscribe"]),
        kinds_mask=_parse_kinds_mask(path, table),
        rate=rate,
        burst=burst,
        vector_rate=_parse_rate(path, table, "vector_rate", inf, allows_zero=True)
        if "vector_rate" in table
        else None,
        expires_at=_parse_expires_at(path, table),
        streams=_parse_streams(path, table),
        limits=Limits.of({name: _parse_limit(path, table, name) for name in LIMIT_NAMES}),
        connections=_parse_connections(path, table),
    )


def _parse_digests(path: str, table: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the hashes of a token, by their paths."""
    given = table.get("sha256")
    hashes = given if isinstance(given, list) else [given]
    if not 1 <= len(hashes) <= SECRETS_MAX:
        raise UsageError(f"{path}sha256: {len(hashes)} hashes: give 1 to {SECRETS_MAX}")
    digests = {}
    for index, text in enumerate(hashes):
        key_path = f"{path}sha256[{index}]" if hashes is given else f"{path}sha256"
        if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text):
            problem = "nothing" if text is None else "something else"  # not shown: it may be the token itself
            raise UsageError(
                f"{key_path}: {problem} instead of 64 hexadecimal digits: give the SHA-256 of the token, as "
                "`delta-prop token new` prints it"
            )
        digests[key_path] = bytes.fromhex(text)
    return digests


def _parse_namespaces(path: str, table: Mapping[str, Any], *, is_needed: bool) -> tuple[str, ...] | None:
    given = table.get("namespaces")
    if given is None:
        if is_needed:
            raise UsageError(
                f'{path}namespaces: missing: give the names that it may use, like ["docs", "img-*"], or ["*"]'
            )
        return ()
    for key, name in _check_patterns(path, "namespaces", given).items():
        if not name or len(name.encode()) > NAMESPACE_BYTES_MAX + 1:
            _raise_invalid(path, key, name, f"give a name of 1 to {NAMESPACE_BYTES_MAX} bytes")
    return None if "*" in given else tuple(given)


def _parse_streams(path: str, table: Mapping[str, Any]) -> tuple[str, ...] | None:
    given = table.get("streams", ["*"])
    for key, name in _check_patterns(path, "streams", given).items():
        if name != "*":
            try:
                check_stream_name(name.removesuffix("*"), allow_internal=True)
            except UsageError as error:
                raise UsageError(f"{path}{key}: {error}") from None
    return None if "*" in given else tuple(given)


def _check_patterns(path: str, list_key: str, given: object) -> dict[str, str]:
    """Return names, and prefixes followed by `*`, by their keys. Raises UsageError."""
    if not isinstance(given, list) or len(given) > NAMES_MAX:
        _raise_invalid(path, list_key, given, f"give a list of up to {NAMES_MAX} names")
    patterns: dict[str, str] = {}
    for index, name in enumerate(given):
        key = f"{list_key}[{index}]"
        if not isinstance(name, str):
            _raise_invalid(path, key, name, "give a name")
        if "*" in name[:-1]:
            _raise_invalid(path, key, name, "put a * only at the end, for any continuation")
        patterns[key] = name
    return patterns


def _parse_kinds_mask(path: str, table: Mapping[str, Any]) -> int:
    given = table.get("operations")
    if given is None:
        return ALL_KINDS
    if not isinstance(given, list):
        _raise_invalid(path, "operations", given, f"give a list of {kind_names()}")
    mask = 0
    for index, name in enumerate(given):
        kind = kind_number(name) if isinstance(name, str) else -1
        if kind < 0:
            _raise_invalid(path, f"operations[{index}]", name, f"give one of {kind_names()}")
        mask |= 1 << kind
    return mask


def _parse_burst(path: str, table: Mapping[str, Any], rate: float, defaults: TokenDefaults) -> int:
    given = table.get("burst")
    if given is None:
        return defaults.burst if rate == inf else max(defaults.burst, int(rate * BURST_S))
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        _raise_invalid(path, "burst", given, "give a whole number of deltas from 1")
    return int(given)


def _parse_rate(path: str, table: Mapping[str, Any], key: str, default: float, *, allows_zero: bool) -> float:
    given = table.get(key, default)
    bound = "from 0 (no limit)" if allows_zero else "above 0, or inf for no limit"
    if isinstance(given, bool) or not isinstance(given, int | float) or isnan(given):
        _raise_invalid(path, key, given, f"give deltas per second, {bound}")
    if given < 0 or (given == 0 and not allows_zero):
        _raise_invalid(path, key, given, f"give deltas per second, {bound}")
    return float(given)


def _parse_limit(path: str, table: Mapping[str, Any], key: str) -> float:
    given = table.get(key, inf)
    if isinstance(given, bool) or not isinstance(given, int | float) or isnan(given) or given <= 0:
        _raise_invalid(path, key, given, "give an amount per second, above 0, or inf for no limit")
    return float(given)


def _parse_connections(path: str, table: Mapping[str, Any]) -> int | None:
    given = table.get("connections")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        _raise_invalid(path, "connections", given, "give a whole number of connections from 1")
    return given


def _parse_expires_at(path: str, table: Mapping[str, Any]) -> int | None:
    given = table.get("expires")
    if given is None:
        return None
    if not isinstance(given, datetime) or given.tzinfo is None:
        _raise_invalid(
            path, "expires", given, "give a time with its zone and without quotes: 2027-01-31T00:00:00Z"
        )
    return int(given.timestamp() * 1_000_000)


def _check_keys(path: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise UsageError(f"{path}{key}: unknown key: {fix}")


def _check_distinct(values: Mapping[str, object]) -> None:
    """Check that no two paths have the same value. Raises UsageError."""
    first_paths: dict[object, str] = {}
    for path, value in values.items():
        if first_paths.setdefault(value, path) != path:
            raise UsageError(f"{path}: the same as {first_paths[value]}: give another one")


def _raise_invalid(path: str, key: str, given: object, fix: str) -> NoReturn:
    problem = "missing" if given is None else f"{given!r:.80}"
    raise UsageError(f"{path}{key}: {problem}: {fix}")
