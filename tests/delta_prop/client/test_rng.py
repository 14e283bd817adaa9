"""Clients that block leave Python's own generator alone: the program may have seeded it."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import pytest

from delta_prop.client import ClientSettings, SyncProducer, facts
from delta_prop.client.errors import Unreachable
from delta_prop.client.ranges import RangeReader
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.client.threaded import served

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES_S = 0.3


@pytest.fixture
def nobody() -> str:
    """An address that refuses connections, as nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def open_producer(address: str) -> None:
    with SyncProducer(address, name="p", settings=ClientSettings(open_timeout_s=TRIES_S)):
        pass


def ask_for_a_range(address: str) -> None:
    RangeReader(address, settings=ClientSettings(open_timeout_s=TRIES_S)).bounds()


def ask_for_a_fact(address: str) -> None:
    facts.get(address, "v", timeout_s=TRIES_S)


@pytest.mark.parametrize("call", [open_producer, ask_for_a_range, ask_for_a_fact])
def test_tries_in_vain_take_no_number_of_the_programs(call: Callable[[str], None], nobody: str) -> None:
    before = random.getstate()
    with pytest.raises(Unreachable):
        call(nobody)
    assert random.getstate() == before


def test_a_producer_that_publishes_takes_none_either() -> None:
    before = random.getstate()
    with served() as service, SyncProducer(service.address, name="p") as p:
        p.publish(Delta("a", create([1.0])))
    assert random.getstate() == before
