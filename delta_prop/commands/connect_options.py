"""Options of several verbs: positions in a log; addresses, token, TLS. No argument holds the token itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from delta_prop.directory.log_positions import LogPosition, parse_position
from delta_prop.platform import system
from delta_prop.platform.ports import Tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

TOKEN_VARIABLE = "DELTA_PROP_TOKEN"
_Default = TypeVar("_Default", LogPosition, None)


class ConnectOptions(NamedTuple):
    """Options to connect to one service; `addresses`: its addresses, tried in turn."""

    addresses: tuple[str, ...]
    token: str | None = None
    tls: Tls | None = None


def source_of(options: Namespace) -> str | ConnectOptions:
    """Return the data directory that the options name, or how to connect to a server. Raises UsageError."""
    data: str | None = options.data
    return connect_options_of(options) if data is None else data


def connect_options_of(options: Namespace) -> ConnectOptions:
    """Read the options of `add_server_arguments` and the environment. Raises UsageError."""
    token = system.read_environment().get(TOKEN_VARIABLE) or None
    if options.token_file is not None:
        token = system.read_token(options.token_file)
    authorities, certificate, key = options.tls_ca, options.tls_certificate, options.tls_key
    if (certificate is None) != (key is None):
        raise UsageError("--tls-certificate and --tls-key: give both, or neither")
    uses_tls = options.tls or any(value is not None for value in (authorities, certificate, options.tls_name))
    tls = Tls(certificate, key, authorities, options.tls_name) if uses_tls else None
    addresses = (options.server,) if isinstance(options.server, str) else tuple(options.server)
    return ConnectOptions(addresses, token, tls)


def read_position(
    option: str, text: str | None, default: _Default, *, allow_ends: bool = True, allow_future: bool = False
) -> LogPosition | _Default:
    """Parse the position of a command's option as `parse_position` does; return `default` if none is given.

    Raises UsageError.
    """
    if text is None:
        return default
    return parse_position(option, text, system.wall_us(), allow_ends=allow_ends, allow_future=allow_future)
