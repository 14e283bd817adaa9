"""A server tells its clients the address that its operator has given."""

from __future__ import annotations

import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Ack, Describe, Description
from tests.delta_prop.server.raw import ORIGIN, connected, serving
from tests.delta_prop.server.test_server_streams import ask


@pytest.mark.parametrize("address", [None, "facts.example.net:7373", "[2001:db8::1]:80"])
def test_welcome_and_description_have_the_advertised_address(address: str | None) -> None:
    async def main() -> None:
        network = VirtualNetwork(1)
        async with (
            Propagator(world=virtual_world(1, network=network)) as p,
            serving(p, ServerSettings(port=0, advertise=address)) as (service, listening),
            connected(listening, network) as raw,
        ):
            assert isinstance(service, Service)
            welcome = (await raw.hello(ORIGIN)).welcome
            assert welcome is not None
            assert welcome.address == address
            answer = await ask(raw, Describe())
            assert isinstance(answer, Ack)
            assert isinstance(answer.response, Description)
            assert answer.response.address == address

    run_virtual(main)


@pytest.mark.parametrize(
    "address",
    ["", "facts", "facts:0", "facts:65536", "a b:1", "::1", "a:1:2", "a\n:1", "x" * 251 + ":7373", 7, b"a:1"],
)
def test_invalid_address_is_refused_with_the_form_to_give(address: object) -> None:
    with pytest.raises(UsageError, match=r"^advertise = .*: give HOST:PORT"):
        ServerSettings(advertise=address)  # type: ignore[arg-type]
