"""The permissions of a connection: the rights of one token.

Pure. A refusal has the same text on the wire for every cause; only the audit log gets the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from delta_prop.server.quotas import NO_LIMITS, Limits
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import KIND_MAX, Topic, TopicKind, kind_name

ALL_KINDS = (1 << KIND_MAX + 1) - 1
"""The mask of every kind of operation, those without a name too."""
ANONYMOUS = "anonymous"
"""The name of clients of a server without tokens."""


class NamePatterns:
    """Names, and prefixes followed by `*`; None for all names."""

    __slots__ = ("_names", "_prefixes")

    def __init__(self, patterns: Sequence[str] | None) -> None:
        patterns = ("*",) if patterns is None else patterns
        self._names = frozenset([name for name in patterns if not name.endswith("*")])
        self._prefixes = tuple([name[:-1] for name in patterns if name.endswith("*")])

    def covers(self, name: str) -> bool:
        """Return True if a pattern matches the name."""
        return name in self._names or name.startswith(self._prefixes)


class Unauthorized(Refused):
    """The refusal of everything that a token does not allow. `cause` never leaves the server."""

    def __init__(self, cause: str) -> None:
        super().__init__(ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Permissions:
    """Rights, each denied unless given. `namespaces`, `streams`: names, or prefixes followed by `*`; None for
    all.

    `publish`, `subscribe` apply to these namespaces, all rights but `admin` to these streams. `forward`:
    forward another service's log, complete, with every producer's deltas. `admin`: read the service's status.
    `manage`: change its streams. `kinds_mask`: bit k is set if operations of kind k may be published. `rate`:
    deltas per second; `burst`: deltas at once; `vector_rate`: deltas per second of one vector, None for the
    server's. `expires_at`: microseconds since 1970, None for never. `limits`: amounts per second;
    `connections`: how many may be open, None for no limit.
    """

    name: str
    publish: bool = False
    subscribe: bool = False
    forward: bool = False
    admin: bool = False
    manage: bool = False
    namespaces: tuple[str, ...] | None = ()
    kinds_mask: int = ALL_KINDS
    rate: float = inf
    burst: int = 1
    vector_rate: float | None = None
    expires_at: int | None = None
    streams: tuple[str, ...] | None = None
    limits: Limits = NO_LIMITS
    connections: int | None = None
    _namespaces: NamePatterns = field(init=False, repr=False, compare=False)
    _streams: NamePatterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the only way to set a field of a frozen dataclass
        set_field(self, "_namespaces", NamePatterns(self.namespaces))
        set_field(self, "_streams", NamePatterns(self.streams))

    def can_use_stream(self, stream: str) -> bool:
        """Return True if the rights apply to the stream of this name."""
        return self.streams is None or self._streams.covers(stream)

    def check_stream(self, stream: str) -> None:
        """Check that the rights apply to the stream of this name. Raises Unauthorized."""
        if not self.can_use_stream(stream):
            raise Unauthorized(f"the token may not use stream {stream!r:.80}")

    def hide_streams(self, refused: Refused) -> Refused:
        """Return a refusal without the names of streams that the token may not use.

        Whether a number is that of another stream, or of none, makes no difference to the client.
        """
        if self.streams is None or refused.code is not ErrorCode.UNKNOWN_STREAM:
            return refused
        name = refused.details.get("name")
        if not isinstance(name, str) or not self.can_use_stream(name):
            return Unauthorized(refused.message)
        text = f"stream {name!r:.80}: unknown: give one that exists, or create it"
        return Refused(ErrorCode.UNKNOWN_STREAM, text, details={"name": name})

    def can_publish(self, namespace: str) -> bool:
        """Return True if deltas of this namespace may be sent."""
        return self.publish and self._namespaces.covers(namespace)

    def can_read(self, namespace: str) -> bool:
        """Return True if deltas of this namespace may be received."""
        return self.subscribe and self._namespaces.covers(namespace)

    def check_read(self, namespace: str) -> None:
        """Check that a fact of this namespace may be read. Raises Unauthorized."""
        if not self.can_read(namespace):
            raise Unauthorized(f"the token may not read namespace {namespace!r:.80}")

    @property
    def read_filter(self) -> Callable[[str], bool] | None:
        """A filter for the namespaces that a subscription may read; None if it may read all."""
        return None if self.subscribe and self.namespaces is None else self.can_read

    def check_origins(self, source: Source) -> None:
        """Check that a hello may claim origins. Raises Unauthorized."""
        if not self.publish:
            raise Unauthorized("the token may not publish")
        if source is Source.REPLICA and not self.forward:
            raise Unauthorized("the token may not forward another service's deltas")

    def check_publish(self, namespaces: Iterable[str], kinds_mask: int) -> None:
        """Check a batch by its namespaces and its mask of kinds. Raises Unauthorized."""
        if not self.publish:
            raise Unauthorized("the token may not publish")
        if self.namespaces is not None:
            for name in namespaces:
                if not self._namespaces.covers(name):
                    raise Unauthorized(f"the token may not publish to namespace {name!r:.80}")
        if forbidden := kinds_mask & ~self.kinds_mask:
            kind = (forbidden & -forbidden).bit_length() - 1
            raise Unauthorized(f"the token may not publish operation {kind_name(kind)!r}")

    def check_subscribe(self, topics: Iterable[Topic]) -> None:
        """Check a subscription; `read_filter` narrows wider topics later. Raises Unauthorized."""
        if not self.subscribe:
            raise Unauthorized("the token may not subscribe")
        for topic in topics:
            if topic.kind is TopicKind.NAMESPACE and not self._namespaces.covers(str(topic.value)):
                raise Unauthorized(f"the token may not read namespace {topic.value!r:.80}")

    def check_admin(self) -> None:
        """Check that the service's status may be read. Raises Unauthorized."""
        if not self.admin:
            raise Unauthorized("the token lacks the right admin")

    def check_manage(self) -> None:
        """Check that streams may be changed. Raises Unauthorized."""
        if not self.manage:
            raise Unauthorized("the token lacks the right manage")


ALL_PERMISSIONS = Permissions(
    ANONYMOUS, publish=True, subscribe=True, forward=True, admin=True, manage=True, namespaces=None
)
"""The permissions of every client of a server without tokens."""
