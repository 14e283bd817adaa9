"""Blocking clients do not use Python's global random generator, which the program may have seeded."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import pytest

from delta_prop.client import ClientSettings, SyncProducer, facts
from delta_prop.client.errors import Unreachable
from delta_prop.client.ranges import RangeReader
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.client.threaded_service import served

if TYPE_CHECKING:
    from collections.abc import Callable

OPEN_TIMEOUT_S = 0.3


@pytest.fixture
def unreachable_address() -> str:
    """Return an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def open_producer(address: str) -> None:
    with SyncProducer(address, name="p", settings=ClientSettings(open_timeout_s=OPEN_TIMEOUT_S)):
        pass


def request_range(address: str) -> None:
    RangeReader(address, settings=ClientSettings(open_timeout_s=OPEN_TIMEOUT_S)).bounds()


def request_fact(address: str) -> None:
    facts.get(address, "v", timeout_s=OPEN_TIMEOUT_S)


@pytest.mark.parametrize("call", [open_producer, request_range, request_fact])
def test_failed_connects_leave_the_global_rng_unchanged(
    call: Callable[[str], None], unreachable_address: str
) -> None:
    before = random.getstate()
    with pytest.raises(Unreachable):
        call(unreachable_address)
    assert random.getstate() == before


def test_publish_leaves_the_global_rng_unchanged() -> None:
    before = random.getstate()
    with served() as service, SyncProducer(service.address, name="p") as p:
        p.publish(Delta("a", create([1.0])))
    assert random.getstate() == before
