"""Addresses of services: parses and checks `host:port`.

Pure. The network resolves host names when it connects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from delta_prop_wire.errors import UsageError

PORT = 7373
_PORT_MAX = 65_535
ADDRESSES_MAX = 64


class Address(NamedTuple):
    """One host and port to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = PORT) -> Address:
        """Parse `host`, `host:port` or `[IPv6]:port`. Raises UsageError.

        `default_port`: the port if the text names none.
        """
        if not isinstance(text, str):
            raise _invalid_address(text, default_port)
        if text.startswith("["):
            host, closed, rest = text[1:].partition("]")
            if not closed or (rest and not rest.startswith(":")):
                raise _invalid_address(text, default_port)
            port = rest[1:] if rest else str(default_port)
        else:
            host, colon, port = text.partition(":")
            port = port if colon else str(default_port)
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if not host or any(character.isspace() or character == "/" for character in host):
            raise _invalid_address(text, default_port)
        if not 1 <= number <= _PORT_MAX:
            raise _invalid_address(text, default_port, f" with a port from 1 to {_PORT_MAX}")
        return cls(host, number)


def parse_addresses(addresses: str | Iterable[str]) -> tuple[Address, ...]:
    """Parse one or several addresses of one service; drop duplicates. Raises UsageError."""
    if isinstance(addresses, str):
        texts = [addresses]
    elif isinstance(addresses, Iterable):
        texts = list(addresses)
    else:
        raise _invalid_address(addresses)
    if not 1 <= len(texts) <= ADDRESSES_MAX:
        raise UsageError(f"{len(texts)} addresses: give 1 to {ADDRESSES_MAX}, as host:port")
    return tuple(dict.fromkeys(map(Address.parse, texts)))


def _invalid_address(text: object, default_port: int = PORT, hint: str = "") -> UsageError:
    return UsageError(
        f"address {text!r:.80}: give host:port{hint}, "
        f"such as 127.0.0.1:{default_port} or [::1]:{default_port}"
    )
