"""One question to a service, by plain blocking calls, over as many connections as it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.checks import check_timeout
from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking import CHANCE, Wire
from delta_prop.client.errors import Unreachable
from delta_prop.client.outage import Outage
from delta_prop.client.settings import ClientSettings
from delta_prop.misconfigured import Lasting, Misconfigured
from delta_prop.tls_contexts import client_context
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import Ack, Hello, Nack, Welcome
from delta_prop_wire.requests import joined

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from delta_prop.client.addresses import Address
    from delta_prop.ports import Tls
    from delta_prop_wire.frames import Frame, Request, Response


@dataclass(frozen=True, slots=True)
class Asking:
    """Asks a service one thing. `client`: a name for people; `cure`: what to do when nobody answers.

    `check` looks at each welcome, and raises where that service cannot answer. `unheard`: what a refusal
    means when an earlier attempt may have had its effect; None: what it says. `failed` hears of each
    attempt that failed.
    """

    client: str
    token: str | None
    tls: Tls | None
    timeout_s: float
    cure: str
    check: Callable[[Welcome], None] | None = None
    unheard: Callable[[Refused], Response | None] | None = None
    failed: Callable[[Exception], None] | None = None

    def ask(self, addresses: str | Iterable[str], request: Request) -> Response:
        """The answer. Raises Refused, Unreachable, UsageError."""
        where = parse_addresses(addresses)
        check_connection(self.token, self.tls)
        if not check_timeout(self.timeout_s):
            raise UsageError("timeout_s 0: give the seconds to wait, above 0")
        began = time.monotonic()
        deadline = began + self.timeout_s
        context = None if self.tls is None else client_context(self.tls)
        backoff, lasting, turn, unheard = Backoff(), Lasting(len(where)), 0, False
        outage = Outage(where)
        while True:
            address = where[turn % len(where)]
            turn += 1
            try:
                return self._ask_at(address, request, context, deadline)
            except (OSError, PeerError, Misconfigured) as error:
                lasting.note(error)
                cause: Exception = error
                wait_s, unheard = 0.0, True
            except Refused as refused:
                meant = self.unheard(refused) if unheard and self.unheard is not None else None
                if meant is not None:
                    return meant
                if not refused.retryable:
                    raise
                cause, wait_s = refused, (refused.retry_after_ms or 0) / 1000
            if self.failed is not None:
                self.failed(cause)
            wait_s = max(wait_s, backoff.next_s(CHANCE.random()) if turn % len(where) == 0 else 0.0)
            now = time.monotonic()
            if now + wait_s >= deadline:
                raise self._given_up(where, cause, now - began) from None
            outage.lasts(cause, now - began, deadline - now)
            time.sleep(wait_s)

    def _ask_at(
        self, address: Address, request: Request, context: ssl.SSLContext | None, deadline: float
    ) -> Response:
        settings = ClientSettings()
        connect_s_max = max(min(settings.connect_s_max, deadline - time.monotonic()), 0.05)
        server_name = None if self.tls is None else self.tls.server_name
        wire = Wire(address, connect_s_max, context, server_name, settings)
        try:
            hello = Hello(token=self.token, client=self.client)
            welcome = _answer(wire, hello, deadline, settings.silence_s_max)
            if self.check is not None and isinstance(welcome, Welcome):
                self.check(welcome)
            return _answer(wire, request, deadline, settings.silence_s_max)
        finally:
            wire.close()

    def _given_up(self, where: Sequence[Address], cause: Exception, waited_s: float) -> Exception:
        if isinstance(cause, Refused | UsageError):
            return cause
        names = ", ".join(map(str, where))
        return Unreachable(
            f"none of {names} has answered for {waited_s:.1f} s (the last one: {cause}): {self.cure}"
        )


def _answer(wire: Wire, request: Request, deadline: float, silence_s_max: float) -> Response:
    number, raw = wire.session.request(request)
    wire.send([raw])
    pages: list[Response] = []
    while (left_s := min(deadline - time.monotonic(), silence_s_max)) > 0:
        session, now = wire.session, time.monotonic()
        if session.patience_s(now) <= 0:
            raise ConnectionError(f"{wire.address} has been silent for too long")
        beat = session.beat(now)
        wire.send(() if beat is None else (beat,))
        if not wire.step(min(left_s, max(session.beat_wait_s(now), 0.01))):
            continue
        for frame in session.frames(time.monotonic()):
            if (ack := _answer_to(frame, number)) is None:
                continue
            if ack.response is None:
                raise ConnectionError(f"{wire.address} answered something else")
            pages.append(ack.response)
            if not ack.more:
                return joined(pages)
    raise ConnectionError(f"{wire.address} has not answered in time")


def _answer_to(frame: Frame, number: int) -> Ack | None:
    """The answer to a request, None where this is something else. Raises Refused."""
    if isinstance(frame, Nack) and (frame.correlation_id == number or not frame.sequence):
        raise frame.refusal()
    return frame if isinstance(frame, Ack) and frame.correlation_id == number else None
