"""Counts and audits the refusals that one connection sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.server.audit import Audit
    from delta_prop.server.connected_client import ConnectedClient
    from delta_prop.server.counters import Counters
    from delta_prop_wire.errors import ProtocolError, Refused
    from delta_prop_wire.spec import ErrorCode


class RefusalLog:
    """The refusals of one client."""

    def __init__(self, client: ConnectedClient, counters: Counters, audit: Audit) -> None:
        self._client = client
        self._counters = counters
        self._audit = audit

    def record(self, frame: str, refusal: Refused | ProtocolError) -> None:
        """Count a refusal, and write it to the audit log. `frame`: the type of the refused frame."""
        self._counters.count_nack(refusal.code)
        self._audit.record_refusal(self._client.address, self._client.permissions, frame, refusal)

    def count(self, code: ErrorCode) -> None:
        """Only count a refusal: it reports the outcome of an earlier delta."""
        self._counters.count_nack(code)
