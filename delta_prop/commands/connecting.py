"""What every verb that connects is given: where to, a token, TLS. The token never stands in the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.commands import edge
from delta_prop.ports import Tls
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

TOKEN_VARIABLE = "DELTA_PROP_TOKEN"


class Link(NamedTuple):
    """How to connect to one service; `addresses`: several ways to the same one."""

    addresses: tuple[str, ...]
    token: str | None = None
    tls: Tls | None = None


def link_of(options: Namespace) -> Link:
    """What the options of `server_arguments` say, and the environment. Raises UsageError."""
    token = edge.environment().get(TOKEN_VARIABLE) or None
    if options.token_file is not None:
        token = edge.read_token(options.token_file)
    authorities, certificate, key = options.tls_ca, options.tls_certificate, options.tls_key
    if (certificate is None) != (key is None):
        raise UsageError("--tls-certificate and --tls-key: give both, or neither")
    wanted = options.tls or any(one is not None for one in (authorities, certificate, options.tls_name))
    tls = Tls(certificate, key, authorities, options.tls_name) if wanted else None
    addresses = (options.server,) if isinstance(options.server, str) else tuple(options.server)
    return Link(addresses, token, tls)
