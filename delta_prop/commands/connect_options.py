"""Connection options of the verbs that connect: addresses, token, TLS. No argument holds the token itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.platform import system
from delta_prop.platform.ports import Tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

TOKEN_VARIABLE = "DELTA_PROP_TOKEN"


class ConnectOptions(NamedTuple):
    """Options to connect to one service; `addresses`: its addresses, tried in turn."""

    addresses: tuple[str, ...]
    token: str | None = None
    tls: Tls | None = None


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
