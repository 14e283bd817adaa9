"""A store, an index, a cache and a listener follow one stream of deltas.

python examples/quickstart.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from delta_prop import Delta, Propagator, create, sparse
from delta_prop.sinks import CacheSink, IndexSink, ResidentVectors, StorageSink


async def main(path: Path) -> None:
    async with Propagator() as p:
        vectors = ResidentVectors()  # one copy in memory, which store and index share
        storage = await p.attach(StorageSink(path, resident=vectors))
        index = await p.attach(IndexSink(resident=vectors))
        cache = await p.attach(CacheSink(loader=storage.get))

        async with p.subscribe("v:pear") as listener:
            await p.publish(
                Delta("apple", create([1.0, 0.0, 0.0]), metadata={"colour": "red"}),
                Delta("pear", create([0.0, 1.0, 0.0])),
            )
            ack = await p.publish(Delta("pear", sparse([2], [0.5]), metadata={"colour": "green"}))

            await p.wait_visible(ack)  # any sink now shows your own write
            print("nearest:", [hit.vector_id for hit in index.search([0.0, 1.0, 1.0], k=2)])
            pear = await cache.get("default", "pear")
            assert pear is not None
            print("cached:", pear.vector, pear.metadata)
            for _ in range(2):
                received = await anext(listener)
                print("heard:", received.offset, received.delta.vector_id, received.delta.operation.kind)

            await p.wait_visible(ack, sinks=["storage"], committed=True)
            print("on disk:", storage.statistics().committed_offset, "deltas")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(main, Path(folder) / "facts.db")
