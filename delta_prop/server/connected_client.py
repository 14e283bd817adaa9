"""The client of one connection, as its first hello introduces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Source

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions


@dataclass(slots=True, eq=False)
class ConnectedClient:
    """The other end of a connection. `number`: of the connection; `name`: as the client calls itself.

    `permissions`: None before the first hello. `source`: that of its deltas. `codecs`: of compressed frames
    that it can read.
    """

    number: int
    address: str
    name: str | None = None
    permissions: Permissions | None = None
    source: Source = Source.LOCAL
    codecs: frozenset[int] = frozenset()

    @property
    def rights(self) -> Permissions:
        """Its permissions, after the first hello."""
        assert self.permissions is not None, "the connection passes no other frame before a hello"
        return self.permissions
