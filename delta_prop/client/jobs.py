"""Jobs over the network: what tasks have staged is committed or dropped as a whole, by plain blocking calls.

A decision may be sent again, so each call goes on through lost connections until its time is over. Tasks
stage with `SyncProducer(…, job=JobPart(…))`.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking import Wire
from delta_prop.client.errors import Unreachable
from delta_prop.client.producing import check_stages
from delta_prop.client.settings import ClientSettings
from delta_prop.tls_contexts import client_context
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    Decide,
    Decision,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Nack,
    StagedPart,
    attempt_of,
)
from delta_prop_wire.requests import PARTS_MAX
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from delta_prop.client.addresses import Address
    from delta_prop.ports import Tls
    from delta_prop_wire.frames import Frame

__all__ = ["Decision", "JobPart", "JobState", "JobStatus", "StagedPart", "attempt_of", "decide"]

_CLIENT = "decides a job"


def decide(
    addresses: str | Iterable[str],
    job: str,
    decision: Decision,
    parts: Iterable[StagedPart] = (),
    *,
    run: int | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
) -> JobStatus:
    """Have a job published (COMMIT, with all `parts` that count), or dropped and forgotten (ABORT), or ask
    how it is (LOOK). `run`: with ABORT, drop only what this run of the job has staged (`attempt_of`), if
    anything; what another driver stages under the same name stays.

    Once this returns the decision is on disk. Raises Refused (UNKNOWN_JOB, JOB_DECIDED, …; nothing is decided
    then), Unreachable (nobody knows), UsageError.
    """
    named = tuple(parts)
    if len(named) > PARTS_MAX:
        raise UsageError(f"job {job!r} has {len(named)} parts, allowed are {PARTS_MAX}: stage fewer, larger")
    where = parse_addresses(addresses)
    call = _Call(Decide(job, decision, named, run), token, time.monotonic() + timeout_s)
    context = None if tls is None else client_context(tls)
    backoff, turn, unheard = Backoff(), 0, False
    while True:
        address = where[turn % len(where)]
        turn += 1
        try:
            return call.ask(address, context, None if tls is None else tls.server_name)
        except (OSError, PeerError) as error:
            cause: Exception = error
            wait_s, unheard = 0.0, True
        except Refused as refused:
            if unheard and decision is Decision.ABORT and refused.code is ErrorCode.UNKNOWN_JOB:
                return JobStatus(JobState.ABORTED)  # as was asked before, and not heard
            if not refused.retryable:
                raise
            cause, wait_s = refused, (refused.retry_after_ms or 0) / 1000
        wait_s = max(wait_s, backoff.next_s(random.random()) if turn % len(where) == 0 else 0.0)
        if time.monotonic() + wait_s >= call.deadline:
            raise _given_up(where, timeout_s, cause) from None
        time.sleep(wait_s)


class _Call:
    """One question, over as many connections as it takes."""

    def __init__(self, request: Decide, token: str | None, deadline: float) -> None:
        self.deadline = deadline
        self._request = request
        self._token = token
        self._settings = ClientSettings()

    def ask(self, address: Address, context: ssl.SSLContext | None, server_name: str | None) -> JobStatus:
        """Ask there. Raises OSError, PeerError, Refused, UsageError."""
        connect_s_max = max(min(self._settings.connect_s_max, self.deadline - time.monotonic()), 0.05)
        wire = Wire(address, connect_s_max, context, server_name, self._settings)
        try:
            welcome = self._answer(wire, Hello(token=self._token, client=_CLIENT)).welcome
            assert welcome is not None, "an answer to a hello"
            check_stages(welcome)
            status = self._answer(wire, self._request).job
            if status is None:
                raise ConnectionError(f"{address} answered something else")
            return status
        finally:
            wire.close()

    def _answer(self, wire: Wire, request: Hello | Decide) -> Ack:
        number, raw = wire.session.request(request)
        wire.send([raw])
        while (left_s := min(self.deadline - time.monotonic(), self._settings.silence_s_max)) > 0:
            session, now = wire.session, time.monotonic()
            if session.patience_s(now) <= 0:
                raise ConnectionError(f"{wire.address} has been silent for too long")
            beat = session.beat(now)
            wire.send(() if beat is None else (beat,))
            if not wire.step(min(left_s, max(session.beat_wait_s(now), 0.01))):
                continue
            for frame in session.frames(time.monotonic()):
                if (ack := _told(frame, number)) is not None:
                    return ack
        raise ConnectionError(f"{wire.address} has not answered in time")


def _told(frame: Frame, number: int) -> Ack | None:
    """The answer to a request, None where this is something else. Raises Refused."""
    if isinstance(frame, Nack) and (frame.correlation_id == number or not frame.sequence):
        raise frame.refusal()
    if not isinstance(frame, Ack) or frame.correlation_id != number:
        return None
    return None if frame.more else frame


def _given_up(where: tuple[Address, ...] | list[Address], timeout_s: float, cause: Exception) -> Exception:
    if isinstance(cause, Refused):
        return cause
    names = ", ".join(map(str, where))
    return Unreachable(
        f"none of {names} has answered for {timeout_s:g} s (the last one: {cause}): look how the job is, or "
        "send the decision again, which decides nothing twice"
    )
