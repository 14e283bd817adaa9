"""The configuration's sections: one frozen dataclass each, with the defaults.

The sections `server`, `settings` and `log` are the settings of the server, the propagator and the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from delta_prop.api.settings import Settings
from delta_prop.configuration.sinks import SinkConfig, check_sinks
from delta_prop.configuration.values import File, with_path
from delta_prop.platform.ports import Tls
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.errors import UsageError

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "json", "text"]
SEGMENT_BYTES_MIN = 64 * 1024
"""Minimum segment size: a smaller segment would hold little more than one frame."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `certificate`, `key`: the server's; without them, connections are not encrypted.
    `authorities`: if given, clients must present a certificate that one of them signed.
    """

    certificate: File | None = None
    key: File | None = None
    authorities: File | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Access control. `tokens`: the token file. Without it everybody may do everything, and the server
    listens on this machine only, unless `server.allow_anonymous` is true.
    """

    tokens: File | None = None


@dataclass(frozen=True, slots=True)
class Logging:
    """The server's own log on standard error. `format`: `auto` is text on a terminal, else JSON lines."""

    level: LogLevel = "info"
    format: LogFormat = "auto"


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings of a server. `data`: the directory of the log."""

    data: File | None = None
    server: ServerSettings = field(default_factory=ServerSettings)
    settings: Settings = field(default_factory=Settings)
    log: LogSettings = field(default_factory=LogSettings)
    tls: TlsFiles = field(default_factory=TlsFiles)
    access: Access = field(default_factory=Access)
    logging: Logging = field(default_factory=Logging)
    sinks: tuple[SinkConfig, ...] = ()

    def __post_init__(self) -> None:
        check_sinks(self.sinks)
        for index, sink in enumerate(self.sinks):
            try:
                self.settings.feed_limits(sink.batch_deltas, sink.linger_ms)
            except UsageError as error:
                raise with_path(error, f"sinks[{index}]", ("batch_deltas", "linger_ms")) from None
        if (self.tls.certificate is None) != (self.tls.key is None):
            missing = "key" if self.tls.key is None else "certificate"
            raise UsageError(f"tls.{missing}: it is missing: give both the certificate and its key")
        if self.tls.authorities is not None and self.tls.certificate is None:
            raise UsageError(
                "tls.authorities: without tls.certificate and tls.key nothing is encrypted, and no client is "
                "asked for a certificate: add them"
            )
        if self.log.segment_bytes_max < SEGMENT_BYTES_MIN:
            raise UsageError(
                f"log.segment_bytes_max {self.log.segment_bytes_max}: each segment is a file: give at least "
                f"{SEGMENT_BYTES_MIN}"
            )
        if self.settings.queue_bytes_max < self.server.frame_bytes_max:
            raise UsageError(
                f"settings.queue_bytes_max {self.settings.queue_bytes_max} is below server.frame_bytes_max "
                f"{self.server.frame_bytes_max}: raise it: an accepted frame must fit into the queue"
            )
        if self.server.producer_bytes_credit > self.settings.queue_bytes_max:
            raise UsageError(
                f"server.producer_bytes_credit {self.server.producer_bytes_credit} is above "
                f"settings.queue_bytes_max {self.settings.queue_bytes_max}: lower it: one producer's bytes "
                "must fit into the queue"
            )

    @property
    def served_tls(self) -> Tls | None:
        """The server's TLS files; None if it does not encrypt."""
        files = self.tls
        return None if files.certificate is None else Tls(files.certificate, files.key, files.authorities)

    def memory_bytes_max(self) -> int:
        """Return the sum of all memory bounds here, in bytes, without the sinks' own memory."""
        return (
            self.settings.memory_bytes_max(len(self.sinks))
            + self.server.memory_bytes_max()
            + self.log.unwritten_bytes_max
            + self.log.tail_bytes_max
            + self.log.compact_memory_bytes_max
        )
