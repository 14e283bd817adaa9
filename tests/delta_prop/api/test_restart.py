"""A new propagator knows the vectors of the storage file that is attached to it."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import numpy as np
import pytest

from delta_prop import ABSENT, Delta, Propagator, create, delete, offset, scale, sparse
from delta_prop.sinks import IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode


def test_vectors_persist_across_service_restarts(tmp_path: Path) -> None:
    rng, expected = random.Random(7), dict[str, np.ndarray]()

    async def run_session() -> None:
        async with Propagator() as p:
            resident = ResidentVectors()
            storage = await p.attach(StorageSink(tmp_path / "facts.db", resident=resident))
            index = await p.attach(IndexSink(resident=resident))
            for _ in range(200):
                key = f"k{rng.randrange(40)}"
                if key not in expected or rng.random() < 0.2:
                    expected[key] = np.array([rng.random() for _ in range(4)], np.float32)
                    last = await p.publish(Delta(key, create(expected[key])))
                elif rng.random() < 0.2:
                    last = await p.publish(Delta(key, delete()))
                    del expected[key]
                else:
                    last = await p.publish(Delta(key, scale(0.5)))
                    expected[key] = expected[key] * np.float32(0.5)
            await p.wait_visible(last, committed=True)
            rows = {key: state.vector async for _, key, state in storage.rows() if state.alive}
            assert {key: row.tolist() for key, row in rows.items() if row is not None} == {
                key: vector.tolist() for key, vector in expected.items()
            }
            assert {hit.vector_id for hit in index.search([1, 1, 1, 1], k=100)} == set(expected)

    for _ in range(3):
        anyio.run(run_session)


async def _publish_one_vector(path: Path) -> None:
    async with Propagator() as p:
        await p.attach(StorageSink(path))
        await p.publish(Delta("old", create([1.0, 2.0])))


def test_vectors_in_the_storage_file_are_known_after_restart(tmp_path: Path) -> None:
    path = tmp_path / "facts.db"
    anyio.run(_publish_one_vector, path)

    async def main() -> None:
        async with Propagator() as p:
            storage = await p.attach(StorageSink(path))
            with pytest.raises(InvalidDelta, match="vectors of 2"):
                await p.publish(Delta("new", create([1.0, 2.0, 3.0])))
            with pytest.raises(InvalidDelta, match="indices"):
                await p.publish(Delta("old", sparse([2], [1.0])))
            dot = p.head("old")
            assert dot is not None
            published = await p.publish(Delta("old", offset(1.0), expect=dot))
            with pytest.raises(Refused) as caught:
                await p.publish(Delta("old", offset(1.0), expect=dot))
            assert caught.value.code is ErrorCode.CONFLICT
            with pytest.raises(Refused, match="expects no vector"):
                await p.publish(Delta("old", create([1.0, 2.0]), expect=ABSENT))
            await p.publish(Delta("not-there", create([1.0, 2.0]), expect=ABSENT))
            await p.wait_visible(published)
            state = await storage.get("default", "old")
            assert state is not None
            assert state.vector is not None
            assert state.vector.tolist() == [2.0, 3.0]

    anyio.run(main)


def test_storage_with_data_must_be_attached_before_publishing(tmp_path: Path) -> None:
    path = tmp_path / "facts.db"
    anyio.run(_publish_one_vector, path)

    async def main() -> None:
        async with Propagator() as p:
            await p.publish(Delta("new", create([1.0, 2.0, 3.0])))
            with pytest.raises(UsageError, match="attach it first"):
                await p.attach(StorageSink(path))
            with pytest.raises(
                UsageError, match="attach this sink before publishing"
            ):  # the file has vectors of another dimension
                await p.attach(StorageSink(path), start="latest")
            assert p.statistics().sinks == {}
            await p.publish(Delta("new", create([3.0, 2.0, 1.0])))
        async with Propagator() as reopened:  # the first propagator has released the file
            await reopened.attach(StorageSink(path))

    anyio.run(main)
