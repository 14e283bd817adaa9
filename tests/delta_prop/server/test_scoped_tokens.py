"""A token reads only rows of its namespaces, with every subscription, and from a log of either kind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop import Delta, opaque, sparse_add
from delta_prop.api.propagator import Propagator
from delta_prop.platform.world import real_world
from delta_prop.server.access import Access
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame, DeltaFrame
from delta_prop_wire.slicing import rows_of
from tests.delta_prop.server.raw import ORIGIN, FrameClient, connected, serving
from tests.delta_prop.server.tokens import TokenFile, table
from tests.full_log import read_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
NAMESPACES = ("docs", "docs-2", "mail", "doc", "img-a", "img-b")
READABLE = {"docs", "img-a", "img-b"}
TOKENS = table("reader", "s-reader", subscribe=True, namespaces='["docs", "img-*"]') + table(
    "writer", "s-writer", publish=True, namespaces='["*"]', rate="inf"
)
BATCHES, ROWS = 60, 12
"""Number of batches, and rows of each."""
TOPICS = {
    "everything": ["*"],
    "an operation": ["op:opaque", "op:sparse_add"],
    "vectors of all namespaces": [f"v:same-{number}" for number in range(3)],
    "everything twice": ["*", "ns:docs", "v:same-0", "c:tag"],
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def draw_batches(rng: random.Random, level: AckLevel) -> list[BatchFrame]:
    """Return batches of mixed namespaces or a single one; ids repeat; about one batch in ten is refused."""
    frames = []
    for number in range(BATCHES):
        namespaces = NAMESPACES if rng.random() < 0.7 else [rng.choice(NAMESPACES)]
        rows = [
            Delta(f"same-{rng.randrange(3)}", opaque(b"x" * 90), rng.choice(namespaces), topics=("tag",))
            for _ in range(ROWS)
        ]
        if rng.random() < 0.1:  # a refused batch is a control row in the log, which no subscriber gets
            rows[rng.randrange(ROWS)] = Delta("unknown", sparse_add([1], [1.0]), "docs")
        base = 1 + number * ROWS
        frames.append(
            BatchFrame(
                base, encode_batch(rows, origin=ORIGIN, base=base, epoch=1, ack_level=level), ack_wanted=True
            )
        )
    return frames


async def read_deltas(client: FrameClient, count: int) -> list[tuple[int, Delta]]:
    """Return the next `count` deltas, from frames of any type."""
    rows: list[tuple[int, Delta]] = []
    while len(rows) < count:
        frame = await client.next()
        assert frame is not None
        if isinstance(frame, BatchFrame):
            rows += [(offset, delta) for offset, _, delta in rows_of(frame)]
            assert set(frame.batch.namespace_names) <= READABLE, (
                "the frame should name readable namespaces only"
            )
        elif isinstance(frame, DeltaFrame):
            rows.append((frame.sequence, frame.delta))
    return rows


@pytest.mark.parametrize("form", ["batches", "deltas"])
@pytest.mark.parametrize("log", ["memory", "files"])
async def test_scoped_token_reads_only_its_namespaces(log: str, form: str, tmp_path: Path) -> None:
    world, more = real_world(), {"data": tmp_path / "data"} if log == "files" else {}
    access = Access(world, TokenFile(TOKENS))
    async with (
        Propagator(**more) as p,
        serving(p, ServerSettings(port=0), access=access) as (_, address),
        connected(address) as producer,
        connected(address) as live,
    ):
        await subscribe(live, ["*"], deltas=form == "deltas")
        await producer.hello(ORIGIN, token="s-writer")
        # At this level, an acknowledged batch is visible; at a lower level, it might not be readable yet.
        level = p.internals().partition.log.ack_level
        await producer.send(*draw_batches(random.Random(5), level))
        await producer.until_acked(BATCHES * ROWS)
        expected = {
            logged.offset + row: delta
            for logged in read_all(p.internals().partition.log)
            if not logged.batch.is_control
            for row in range(logged.count)
            if (delta := logged.batch.delta(row)).namespace in READABLE
        }
        assert 100 < len(expected) < BATCHES * ROWS / 2
        check_received(await read_deltas(live, len(expected)), expected)
        for topics in TOPICS.values():
            async with connected(address) as late:
                await subscribe(late, topics, deltas=form == "deltas")
                check_received(await read_deltas(late, len(expected)), expected)


def check_received(received: list[tuple[int, Delta]], expected: dict[int, Delta]) -> None:
    assert [offset for offset, _ in received] == sorted(expected)
    assert {delta.namespace for _, delta in received} == READABLE
    assert all(delta.vector_id == expected[offset].vector_id for offset, delta in received)


async def subscribe(client: FrameClient, topics: list[str], **more: Any) -> None:
    await client.hello(token="s-reader", features=("lz4", "zstd"))
    await client.subscribe(*topics, **more)
