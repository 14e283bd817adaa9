"""Where services listen: `host:port` as text, one or several.

Pure. Names are looked up by the network, when it connects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from delta_prop_wire.errors import UsageError

PORT = 7373
_PORT_MAX = 65_535
ADDRESSES_MAX = 64


class Address(NamedTuple):
    """One place to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, usual: int = PORT) -> Address:
        """Read `host`, `host:port` or `[IPv6]:port`; `usual`: the port where none is named. Raises
        UsageError.
        """
        if not isinstance(text, str):
            raise _unfit(text, usual)
        if text.startswith("["):
            host, closed, rest = text[1:].partition("]")
            if not closed or (rest and not rest.startswith(":")):
                raise _unfit(text, usual)
            port = rest[1:] if rest else str(usual)
        else:
            host, colon, port = text.partition(":")
            port = port if colon else str(usual)
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if not host or any(letter.isspace() or letter == "/" for letter in host):
            raise _unfit(text, usual)
        if not 1 <= number <= _PORT_MAX:
            raise _unfit(text, usual, f"and a port from 1 to {_PORT_MAX}, ")
        return cls(host, number)


def parse_addresses(addresses: str | Iterable[str]) -> tuple[Address, ...]:
    """One address or several of one service, each once. Raises UsageError."""
    if isinstance(addresses, str):
        texts = [addresses]
    elif isinstance(addresses, Iterable):
        texts = list(addresses)
    else:
        raise _unfit(addresses)
    if not 1 <= len(texts) <= ADDRESSES_MAX:
        raise UsageError(f"{len(texts)} addresses: give 1 to {ADDRESSES_MAX}, as host:port")
    return tuple(dict.fromkeys(map(Address.parse, texts)))


def _unfit(text: object, usual: int = PORT, more: str = "") -> UsageError:
    return UsageError(
        f"address {text!r:.80}: give host:port, {more}such as 127.0.0.1:{usual} or [::1]:{usual}"
    )
