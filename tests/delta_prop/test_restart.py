"""A new propagator beside a file of an earlier one: what the file holds is known, and goes on."""

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


def test_vectors_go_on_over_several_lives_of_the_service(tmp_path: Path) -> None:
    draw, truth = random.Random(7), dict[str, np.ndarray]()

    async def one_life() -> None:
        async with Propagator() as p:
            resident = ResidentVectors()
            storage = await p.attach(StorageSink(tmp_path / "facts.db", resident=resident))
            index = await p.attach(IndexSink(resident=resident))
            for _ in range(200):
                key = f"k{draw.randrange(40)}"
                if key not in truth or draw.random() < 0.2:
                    truth[key] = np.array([draw.random() for _ in range(4)], np.float32)
                    last = await p.publish(Delta(key, create(truth[key])))
                elif draw.random() < 0.2:
                    last = await p.publish(Delta(key, delete()))
                    del truth[key]
                else:
                    last = await p.publish(Delta(key, scale(0.5)))
                    truth[key] = truth[key] * np.float32(0.5)
            await p.wait_visible(last, committed=True)
            rows = {key: state.vector async for _, key, state in storage.rows() if state.alive}
            assert {key: row.tolist() for key, row in rows.items() if row is not None} == {
                key: vector.tolist() for key, vector in truth.items()
            }
            assert {hit.vector_id for hit in index.search([1, 1, 1, 1], k=100)} == set(truth)

    for _ in range(3):
        anyio.run(one_life)


async def _fill(path: Path) -> None:
    async with Propagator() as p:
        await p.attach(StorageSink(path))
        await p.publish(Delta("old", create([1.0, 2.0])))


def test_what_the_file_holds_counts_as_known(tmp_path: Path) -> None:
    path = tmp_path / "facts.db"
    anyio.run(_fill, path)

    async def main() -> None:
        async with Propagator() as p:
            storage = await p.attach(StorageSink(path))
            with pytest.raises(InvalidDelta, match="vectors of 2"):
                await p.publish(Delta("new", create([1.0, 2.0, 3.0])))
            with pytest.raises(InvalidDelta, match="indices"):
                await p.publish(Delta("old", sparse([2], [1.0])))
            dot = p.head("old")
            assert dot is not None
            changed = await p.publish(Delta("old", offset(1.0), expect=dot))
            with pytest.raises(Refused) as caught:
                await p.publish(Delta("old", offset(1.0), expect=dot))
            assert caught.value.code is ErrorCode.CONFLICT
            with pytest.raises(Refused, match="expects no vector"):
                await p.publish(Delta("old", create([1.0, 2.0]), expect=ABSENT))
            await p.publish(Delta("not-there", create([1.0, 2.0]), expect=ABSENT))
            await p.wait_visible(changed)
            state = await storage.get("default", "old")
            assert state is not None
            assert state.vector is not None
            assert state.vector.tolist() == [2.0, 3.0]

    anyio.run(main)


def test_a_file_with_a_past_is_attached_before_anything_is_published(tmp_path: Path) -> None:
    path = tmp_path / "facts.db"
    anyio.run(_fill, path)

    async def main() -> None:
        async with Propagator() as p:
            await p.publish(Delta("new", create([1.0, 2.0, 3.0])))
            with pytest.raises(UsageError, match="attach it first"):
                await p.attach(StorageSink(path))
            with pytest.raises(UsageError, match="attach this sink before publishing"):  # other dimension
                await p.attach(StorageSink(path), start="latest")
            assert p.statistics().sinks == {}
            await p.publish(Delta("new", create([3.0, 2.0, 1.0])))
        async with Propagator() as again:  # the file was let go
            await again.attach(StorageSink(path))

    anyio.run(main)
