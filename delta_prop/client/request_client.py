"""Sends one request to a service by blocking calls, and retries over new connections."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from delta_prop.calls.argument_checks import check_timeout
from delta_prop.client.addresses import Address, parse_addresses
from delta_prop.client.arguments import check_connection
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking_connection import RNG, BlockingConnection
from delta_prop.client.errors import Unreachable
from delta_prop.client.outage import Outage
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.connection_faults import AddressFaults, Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.platform.tls_contexts import client_context
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frames import Ack, Frame, Hello, Nack, Request, Response, Welcome
from delta_prop_wire.requests import join_pages
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

_FINAL = (ErrorCode.UNKNOWN_STREAM, ErrorCode.WRONG_PARTITION)
"""Refusals that a producer may outlive, but that no repeated request does."""


@dataclass(frozen=True, slots=True)
class RequestClient:
    """Sends a service one request.

    `client`: the name that operators see. `fix`: the advice in the error if no service answers.
    `check_welcome` raises if the service of a welcome cannot answer the request. If an earlier attempt may
    have been applied, `resolve_maybe_applied` maps a refusal to a response; if it returns None, the refusal
    is raised. `on_failure` is called with the error of each failed attempt. `log`: the partition to ask.
    """

    client: str
    token: str | None
    tls: Tls | None
    timeout_s: float
    fix: str
    check_welcome: Callable[[Welcome], None] | None = None
    resolve_maybe_applied: Callable[[Refused], Response | None] | None = None
    on_failure: Callable[[Exception], None] | None = None
    log: LogName = DEFAULT_LOG

    def ask(self, addresses: str | Iterable[str], request: Request) -> Response:
        """Return the answer. Raises Refused, Unreachable, UsageError."""
        targets = parse_addresses(addresses)
        check_connection(self.token, self.tls)
        if not check_timeout(self.timeout_s):
            raise UsageError("timeout_s 0: give the seconds to wait, above 0")
        started_at = time.monotonic()
        deadline = started_at + self.timeout_s
        context = None if self.tls is None else client_context(self.tls)
        backoff, address_faults = Backoff(), AddressFaults(len(targets))
        attempt, maybe_applied = 0, False
        outage = Outage(targets)
        while True:
            address = targets[attempt % len(targets)]
            attempt += 1
            try:
                return self._ask_at(address, request, context, deadline)
            except (OSError, ProtocolError, Misconfigured) as error:
                address_faults.note(error)
                cause: Exception = error
                wait_s, maybe_applied = 0.0, True
            except Refused as refused:
                resolved = (
                    self.resolve_maybe_applied(refused)
                    if maybe_applied and self.resolve_maybe_applied is not None
                    else None
                )
                if resolved is not None:
                    return resolved
                if not refused.retryable or refused.code in _FINAL:
                    raise
                cause, wait_s = refused, (refused.retry_after_ms or 0) / 1000
            if self.on_failure is not None:
                self.on_failure(cause)
            wait_s = max(wait_s, backoff.next_s(RNG.random()) if attempt % len(targets) == 0 else 0.0)
            now = time.monotonic()
            if now + wait_s >= deadline:
                raise self._final_error(targets, cause, now - started_at) from None
            outage.on_silence(cause, now - started_at, deadline - now)
            time.sleep(wait_s)

    def _ask_at(
        self, address: Address, request: Request, context: ssl.SSLContext | None, deadline: float
    ) -> Response:
        settings = ClientSettings()
        connect_timeout_s = max(min(settings.connect_timeout_s, deadline - time.monotonic()), 0.05)
        server_name = None if self.tls is None else self.tls.server_name
        connection = BlockingConnection(address, connect_timeout_s, context, server_name, settings)
        try:
            hello = Hello(
                token=self.token, client=self.client, stream=self.log.stream, partition=self.log.partition
            )
            welcome = _exchange(connection, hello, deadline, settings.peer_timeout_s)
            if self.check_welcome is not None and isinstance(welcome, Welcome):
                self.check_welcome(welcome)
            return _exchange(connection, request, deadline, settings.peer_timeout_s)
        finally:
            connection.close()

    def _final_error(self, addresses: Sequence[Address], cause: Exception, waited_s: float) -> Exception:
        if isinstance(cause, Refused | UsageError):
            return cause
        names = ", ".join(map(str, addresses))
        return Unreachable(
            f"none of {names} has answered for {waited_s:.1f} s (the last one: {cause}): {self.fix}"
        )


def _exchange(
    connection: BlockingConnection, request: Request, deadline: float, peer_timeout_s: float
) -> Response:
    number, raw = connection.session.request(request)
    connection.send([raw])
    pages: list[Response] = []
    while (left_s := min(deadline - time.monotonic(), peer_timeout_s)) > 0:
        session, now = connection.session, time.monotonic()
        if session.silence_left_s(now) <= 0:
            raise ConnectionError(f"{connection.address} has been silent for too long")
        beat = session.make_heartbeat(now)
        connection.send(() if beat is None else (beat,))
        if not connection.step(min(left_s, max(session.heartbeat_wait_s(now), 0.01))):
            continue
        for frame in session.frames(time.monotonic()):
            if (ack := _match_answer(frame, number)) is None:
                continue
            if ack.response is None:
                raise ConnectionError(f"{connection.address} sent an unexpected answer")
            pages.append(ack.response)
            if not ack.more:
                return join_pages(pages)
    raise ConnectionError(f"{connection.address} has not answered in time")


def _match_answer(frame: Frame, number: int) -> Ack | None:
    """Return the answer to a request, None if the frame is something else. Raises Refused."""
    if isinstance(frame, Nack) and (frame.correlation_id == number or not frame.sequence):
        raise frame.refusal()
    return frame if isinstance(frame, Ack) and frame.correlation_id == number else None
