"""Services that forward to each other hold the same deltas and states after a network cut."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.testing import run_virtual
from tests.delta_prop.services import Service, Writer, fold_accepted, heal, summarize_state

if TYPE_CHECKING:
    from pathlib import Path

PAIR = [(0, 1), (1, 0)]
CYCLE = [(0, 1), (1, 2), (2, 0)]


@dataclass
class Counters:
    """Counts of events in the runs; a zero means that the case was not tested."""

    deltas: int = 0
    out_of_order: int = 0
    duplicate_ids: int = 0
    left_out_of_index: int = 0


async def run_services(
    seed: int, links: list[tuple[int, int]], folder: Path, durable: bool, counters: Counters
) -> None:
    random = Random(seed)
    services = [
        Service(number, folder, random, durable=durable) for number in range(1 + max(max(links, key=max)))
    ]
    writer = Writer(random)
    async with AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(service)
            await service.p.publish(service.new_delta_of_own_dimension())
        for _ in range(4):
            open_links = random.sample(links, random.randint(0, len(links)))
            for _ in range(random.randint(4, 12)):
                await writer.write(random.choice(services))
                for a, b in open_links:
                    if random.random() < 0.4:
                        await services[a].forward_to(services[b], random.randint(1, 3))
            if random.random() < 0.3:  # sinks apply now, so later rows fold onto partial states
                for service in services:
                    await service.settle()
            if random.random() < 0.3:
                random.choice(services).p.rebuild(random.choice(["storage", "index", "cache"]))
            await anyio.sleep(random.choice((0.01, 100.0)))  # delta chains stay, or expire (after 60 s)
        await heal(services, links)
        expected_by_name = fold_accepted(services)
        first_service_dots = set(services[0].dots())
        for service in services:
            dots = service.dots()
            assert len(dots) == len(set(dots))
            assert set(dots) == first_service_dots
            assert service.p.statistics().pending.pending_runs == 0
            for sink, content in (await service.contents(set(expected_by_name))).items():
                expected_content = {
                    name: summarize_state(state, with_counts=sink != "cache")
                    for name, state in expected_by_name.items()
                }
                assert content == expected_content, (service.number, sink)
            counters.out_of_order += service.index.resident.statistics().out_of_order
            counters.left_out_of_index += service.index.statistics().left_out
            counters.duplicate_ids += sum(bool(logged.known_ids) for logged in service.batches())
        counters.deltas += len(first_service_dots)


@pytest.mark.parametrize("links", [PAIR, CYCLE], ids=["pair", "ring"])
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "disk"])
def test_services_converge_after_network_cuts(
    links: list[tuple[int, int]], durable: bool, tmp_path_factory: pytest.TempPathFactory, full: bool
) -> None:
    counters = Counters()

    @settings(max_examples=60 if full else 2 if durable else 5)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        run_virtual(run_services, seed, links, tmp_path_factory.mktemp("run"), durable, counters, seed=seed)

    check()
    print(counters)
    assert counters.deltas
    assert counters.out_of_order
    assert counters.duplicate_ids
    assert counters.left_out_of_index
