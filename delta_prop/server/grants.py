"""What a connection may do: the rights of one token.

Pure. A refusal says the same on the wire whatever its cause was; the cause is for the audit alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state import UNAUTHORIZED_TEXT
from delta_prop_wire.topics import KIND_MAX, TopicKind, kind_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delta_prop_wire.topics import Topic

ALL_KINDS = (1 << KIND_MAX + 1) - 1
"""The mask of every kind of operation, those without a name too."""
ANONYMOUS = "anonymous"
"""Who connects to a server without tokens."""


class Unauthorized(Refused):
    """The one refusal for whatever a token does not allow. `cause` never leaves the server."""

    def __init__(self, cause: str) -> None:
        super().__init__(ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights, each denied unless given. `namespaces`: names, or beginnings with `*` behind; None: all.

    `publish`, `subscribe` hold in these namespaces. `forward`: hand on another service's log, whole, whoever
    made its deltas. `admin`: see what the service tells of itself. `kinds_mask`: bit k set where operations
    of kind k may be published. `rate` deltas a second, `burst` of them at once; `vector_rate`: of one vector,
    None as the server has it. `expires_at`: microseconds since 1970, None for never.
    """

    name: str
    publish: bool = False
    subscribe: bool = False
    forward: bool = False
    admin: bool = False
    namespaces: tuple[str, ...] | None = ()
    kinds_mask: int = ALL_KINDS
    rate: float = inf
    burst: int = 1
    vector_rate: float | None = None
    expires_at: int | None = None
    _exact: frozenset[str] = field(init=False, repr=False, compare=False)
    _beginnings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ("*",) if self.namespaces is None else self.namespaces
        set_field = object.__setattr__  # the only way into a frozen value
        set_field(self, "_exact", frozenset(name for name in names if not name.endswith("*")))
        set_field(self, "_beginnings", tuple(name[:-1] for name in names if name.endswith("*")))

    def may_publish(self, namespace: str) -> bool:
        """Whether deltas of this namespace may be sent."""
        return self.publish and self._covers(namespace)

    def may_read(self, namespace: str) -> bool:
        """Whether deltas of this namespace may be received."""
        return self.subscribe and self._covers(namespace)

    def check_read(self, namespace: str) -> None:
        """Before a fact is told. Raises Unauthorized."""
        if not self.may_read(namespace):
            raise Unauthorized(f"the token may not read namespace {namespace!r:.80}")

    @property
    def reader(self) -> Callable[[str], bool] | None:
        """What narrows a subscription to what may be read; None where all may."""
        return None if self.subscribe and self.namespaces is None else self.may_read

    def check_origins(self, source: Source) -> None:
        """Before a hello's origins are granted. Raises Unauthorized."""
        if not self.publish:
            raise Unauthorized("the token may not publish")
        if source is Source.REPLICA and not self.forward:
            raise Unauthorized("the token may not forward another service's deltas")

    def check_publish(self, namespaces: Iterable[str], kinds_mask: int) -> None:
        """Before a batch: its table of namespaces, a bit for each kind in it. Raises Unauthorized."""
        if not self.publish:
            raise Unauthorized("the token may not publish")
        if self.namespaces is not None:
            for name in namespaces:
                if not self._covers(name):
                    raise Unauthorized(f"the token may not publish to namespace {name!r:.80}")
        if forbidden := kinds_mask & ~self.kinds_mask:
            kind = (forbidden & -forbidden).bit_length() - 1
            raise Unauthorized(f"the token may not publish operation {kind_name(kind)!r}")

    def check_subscribe(self, topics: Iterable[Topic]) -> None:
        """Before a subscription. A wider topic is granted, and narrowed by `reader`. Raises Unauthorized."""
        if not self.subscribe:
            raise Unauthorized("the token may not subscribe")
        for topic in topics:
            if topic.kind is TopicKind.NAMESPACE and not self._covers(str(topic.value)):
                raise Unauthorized(f"the token may not read namespace {topic.value!r:.80}")

    def check_admin(self) -> None:
        """Before the service tells of itself. Raises Unauthorized."""
        if not self.admin:
            raise Unauthorized("the token is not an admin's")

    def _covers(self, namespace: str) -> bool:
        return namespace in self._exact or namespace.startswith(self._beginnings)


EVERYTHING = Grant(ANONYMOUS, publish=True, subscribe=True, forward=True, admin=True, namespaces=None)
"""What everybody has where there are no tokens."""
