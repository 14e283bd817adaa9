"""`PublishChecks`: the rights of a token, and the limits that apply to its deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop.server.limits import RateLimiter
from delta_prop.server.permissions import Permissions, Unauthorized
from delta_prop.server.produce_handler import PublishChecks
from delta_prop_wire.delta import Delta, Dot, opaque
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.session_fakes import FixedClock, batch_of

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

WRITER = Permissions("writer", publish=True, namespaces=("a",))
LIMITED = Permissions("limited", publish=True, namespaces=("a",), rate=1.0, burst=1)


def make_checks(permissions: Permissions) -> PublishChecks:
    return PublishChecks(permissions, RateLimiter(), FixedClock(), clock_entries_max=1)


def batch(namespace: str) -> Batch:
    return batch_of([Delta("v", opaque(b"x"), namespace)], 1)


def test_run_is_allowed_only_with_all_its_batches() -> None:
    checks = make_checks(WRITER)
    mine, others = batch("a"), batch("b")
    assert checks.allow_run([mine, mine])
    assert not checks.allow_run([mine, others])
    assert not checks.allow_run([others, mine])
    assert checks.allow_run([mine]), "a refused run must not change what is allowed"


def test_run_of_a_limited_token_takes_the_way_that_counts() -> None:
    assert not make_checks(LIMITED).allow_run([batch("a")])


def test_rate_counts_batches_out_of_scope_too() -> None:
    checks = make_checks(LIMITED)
    other = batch("b")
    with pytest.raises(Unauthorized):
        checks.check_batch(other, is_forwarded=False)
    with pytest.raises(Refused) as caught:
        checks.check_batch(other, is_forwarded=False)
    assert caught.value.code is ErrorCode.RATE_LIMITED


def test_forwarded_batch_is_checked_for_its_rate_only() -> None:
    other = batch("b")
    make_checks(WRITER).check_batch(other, is_forwarded=True)
    with pytest.raises(Unauthorized):
        make_checks(WRITER).check_batch(other, is_forwarded=False)


def test_clock_of_a_delta_is_bounded() -> None:
    checks = make_checks(WRITER)
    checks.check_delta(Delta("v", opaque(b""), "a", clock=(Dot(1, 1),)))
    with pytest.raises(InvalidDelta, match="2 entries"):
        checks.check_delta(Delta("v", opaque(b""), "a", clock=(Dot(1, 1), Dot(2, 1))))
