"""What a configuration holds: one dataclass a section, all frozen, all with the defaults that hold alone.

The sections `server`, `settings` and `log` are the settings of those parts themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from delta_prop.config import Settings
from delta_prop.configuration.sinks import SinkTerms, check_together
from delta_prop.configuration.values import File, placed
from delta_prop.ports import Tls
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.errors import UsageError

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "json", "text"]
SEGMENT_BYTES_MIN = 64 * 1024
"""A smaller segment would make a file of almost every frame."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate and key; with `authorities` clients must show one that these
    signed. Without them the server speaks in the clear.
    """

    certificate: File | None = None
    key: File | None = None
    authorities: File | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what. `tokens`: the file of tokens; without it everybody may do everything, and the server
    listens for this machine alone unless `server.allow_anonymous`.
    """

    tokens: File | None = None


@dataclass(frozen=True, slots=True)
class Logging:
    """The server's own log on standard error. `format`: `auto` is text on a terminal, else JSON lines."""

    level: LogLevel = "info"
    format: LogFormat = "auto"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that a server is started with. `data`: the directory of the log."""

    data: File | None = None
    server: ServerSettings = field(default_factory=ServerSettings)
    settings: Settings = field(default_factory=Settings)
    log: LogSettings = field(default_factory=LogSettings)
    tls: TlsFiles = field(default_factory=TlsFiles)
    access: Access = field(default_factory=Access)
    logging: Logging = field(default_factory=Logging)
    sinks: tuple[SinkTerms, ...] = ()

    def __post_init__(self) -> None:
        check_together(self.sinks)
        for place, one in enumerate(self.sinks):
            try:
                self.settings.feed_limits(one.batch_deltas, one.linger_ms_max)
            except UsageError as error:
                raise placed(error, f"sinks[{place}]", ("batch_deltas", "linger_ms_max")) from None
        if (self.tls.certificate is None) != (self.tls.key is None):
            missing = "key" if self.tls.key is None else "certificate"
            raise UsageError(f"tls.{missing}: it is missing: a server shows a certificate and has its key")
        if self.tls.authorities is not None and self.tls.certificate is None:
            raise UsageError(
                "tls.authorities: without tls.certificate and tls.key nothing is encrypted, and nobody asked "
                "for a certificate: add them"
            )
        if self.log.segment_bytes_max < SEGMENT_BYTES_MIN:
            raise UsageError(
                f"log.segment_bytes_max {self.log.segment_bytes_max}: each segment is a file: give at least "
                f"{SEGMENT_BYTES_MIN}"
            )
        if self.settings.queue_bytes_max < self.server.frame_bytes_max:
            raise UsageError(
                f"settings.queue_bytes_max {self.settings.queue_bytes_max} is below server.frame_bytes_max "
                f"{self.server.frame_bytes_max}: a frame that is taken must fit into the queue"
            )
        if self.server.producer_bytes_credit > self.settings.queue_bytes_max:
            raise UsageError(
                f"server.producer_bytes_credit {self.server.producer_bytes_credit} is above "
                f"settings.queue_bytes_max {self.settings.queue_bytes_max}: what one producer may send must "
                "fit into the queue"
            )

    @property
    def served_tls(self) -> Tls | None:
        """What the server shows of itself, None where it speaks in the clear."""
        files = self.tls
        return None if files.certificate is None else Tls(files.certificate, files.key, files.authorities)

    def memory_bytes_max(self) -> int:
        """The worst case of everything bounded here, in bytes; sinks' own comes on top."""
        return (
            self.settings.memory_bytes_max(len(self.sinks))
            + self.server.memory_bytes_max()
            + self.log.unwritten_bytes_max
            + self.log.tail_bytes_max
            + self.log.compact_memory_bytes_max
        )
