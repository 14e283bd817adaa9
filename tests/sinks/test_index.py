"""The exact index equals a plain loop in float64: metrics, ties, fresh rows, bad queries, shared vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_sinks import IndexSink, ResidentVectors, StopSink, StorageSink
from delta_prop_wire.delta import Delta, create, delete, opaque, scale, sparse
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import UsageError
from tests.sinks.support import LOCAL_ORIGIN, FakeLog, check_state, oracle, vectors

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_sinks import Sink


def score(metric: str, query: Any, vector: Any, median: float) -> float:
    q, v = np.asarray(query, np.float64), np.asarray(vector, np.float64)
    if metric == "l2":
        return -float(np.sqrt(((q - v) ** 2).sum()))
    norm = float(np.sqrt((v * v).sum()))
    divisor = {
        "dot": 1.0,
        "cosine": norm * float(np.sqrt((q * q).sum())),
        "pivot": 0.5 * median + 0.5 * norm,
    }[metric]
    return float((q * v).sum()) / (divisor or 1.0)


def find_by_loop(log: FakeLog, query: Any, k: int, metric: str) -> list[tuple[str, float]]:
    """Return the vector ids and scores of the `k` nearest vectors, by a plain loop."""
    states = oracle(log.batches).items()
    vectors_by_id = {ref[1]: s.vector for ref, s in states if ref[0] == "default" and s.vector is not None}
    median = float(
        np.median([np.sqrt((v.astype(np.float64) ** 2).sum()) for v in vectors_by_id.values()] or [0])
    )
    scored = [(-score(metric, query, vector, median), key) for key, vector in vectors_by_id.items()]
    return [(key, -value) for value, key in sorted(scored)[:k]]


small_number = st.integers(-2, 2).map(float)  # many ties
changes = st.one_of(
    st.lists(small_number, min_size=3, max_size=3).map(create),
    st.just(delete()),
    st.builds(lambda value: sparse([1], [value]), small_number),
    st.sampled_from([0.0, 2.0]).map(scale),
    st.just(opaque(b"not a vector")),
)


@given(
    content=st.lists(st.tuples(st.sampled_from("abcdefgh"), changes), min_size=1, max_size=30),
    query=st.lists(small_number, min_size=3, max_size=3),
    k=st.integers(1, 9),
    metric=st.sampled_from(["cosine", "dot", "l2", "pivot"]),
)
def test_search_equals_plain_loop_after_every_delta(content: Any, query: Any, k: int, metric: Any) -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("seed", create([1, 1, 1])))
        index = IndexSink()
        await index.open(log)
        await index.apply(log.deliveries())
        for key, operation in content:
            log.append(Delta(key, operation))
            await index.apply(log.deliveries()[-1:])
            hits = index.search(query, k, metric=metric)
            expected_hits = find_by_loop(log, query, k, metric)
            assert [hit.vector_id for hit in hits] == [key for key, _ in expected_hits]
            assert [hit.score for hit in hits] == pytest.approx([value for _, value in expected_hits])

    anyio.run(main)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2", "pivot"])
def test_rough_scores_never_lose_a_neighbour(metric: Any) -> None:
    """The vectors differ by less than the error of float32 sums, so the second pass decides."""

    async def main() -> None:
        log = FakeLog()
        matrix = vectors(1, 64).repeat(400, axis=0) + vectors(400, 64) * np.float32(3e-7)
        log.append_batch(
            encode_vectors(
                [f"v{i}" for i in range(400)], matrix, namespace="default", origin=LOCAL_ORIGIN, base=1
            )
        )
        index = IndexSink()
        await index.open(log)
        await index.apply(log.deliveries())
        query = vectors(1, 64, seed=9)[0]
        hits = index.search(query, 5, metric=metric)
        assert [hit.vector_id for hit in hits] == [key for key, _ in find_by_loop(log, query, 5, metric)]

    anyio.run(main)


def test_hits_carry_dot_and_ignore_order_of_arrival() -> None:
    async def hits_for(names: list[str]) -> list[tuple[str, float]]:
        log = FakeLog()
        index = IndexSink()
        await index.open(log)
        log.append(*(Delta(name, create([1, 1]), metadata={"name": name}) for name in names))
        await index.apply(log.deliveries())
        hits = index.search([1, 1], 3)
        for hit in hits:
            assert hit.metadata == {"name": hit.vector_id}
            assert hit.dot == (LOCAL_ORIGIN, names.index(hit.vector_id) + 1)
        return [(hit.vector_id, hit.score) for hit in hits]

    async def main() -> None:
        names = [f"v{i}" for i in range(20)]
        in_order, reversed_order = await hits_for(names), await hits_for(names[::-1])
        assert in_order == reversed_order
        assert [name for name, _ in in_order] == ["v0", "v1", "v10"]

    anyio.run(main)


def test_error_of_a_bad_query_names_field_and_bound() -> None:
    async def main() -> None:
        log = FakeLog()
        index = IndexSink()
        await index.open(log)
        assert index.search([1, 2], namespace="nobody") == []
        log.append(Delta("a", create([1, 2, 3])))
        await index.apply(log.deliveries())
        for arguments, message in [
            (([1, 2],), "query: it has 2 numbers and namespace 'default' has dimension 3"),
            (([[1, 2, 3]],), r"query: it has shape \(1, 3\)"),
            (([1, float("nan"), 3],), "query: number 1 is nan"),
            (([1, 2, 1e300],), "query: number 2 is inf"),
            ((["x", 2, 3],), "is not a list of numbers"),
            (([1, 2, 3], 0), "k 0 is not a whole number from 1 to 10000"),
            (([1, 2, 3], 2.5), "k 2.5"),
            (([1, 2, 3], 5, "default", "hamming"), "metric 'hamming' is not one of cosine, dot, l2, pivot"),
        ]:
            with pytest.raises(UsageError, match=message):
                index.search(*arguments)  # type: ignore[arg-type]

    anyio.run(main)


def test_storage_and_index_share_one_copy(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        resident = ResidentVectors()
        storage = StorageSink(tmp_path / "v.db", resident=resident)
        index = IndexSink(resident=resident)
        with pytest.raises(UsageError, match="attach the storage sink first"):
            await index.open(log)
        await storage.open(log)
        assert (await index.open(log)).cursor.next_offset == 0
        for number in range(30):
            log.append(Delta(f"v{number % 7}", create([number, 1])), Delta("v0", sparse([1], [number])))
            sinks: list[Sink] = [storage, index]
            await sinks[number % 2 - 1].apply(log.deliveries()[-1:])
            if number % 3 == 2:
                await storage.flush()  # must not change what the index finds
            scores = {hit.vector_id: hit.score for hit in index.search([3, 1], 10)}
            for (_, vector_id), state in oracle(log.batches).items():
                assert scores[vector_id] == pytest.approx(score("cosine", [3, 1], state.vector, 0))
            if number % 5 == 4:
                await sinks[number % 2].apply(log.deliveries())
        await storage.apply(log.deliveries())
        await index.apply(log.deliveries())
        for ref, state in oracle(log.batches).items():
            check_state(resident.state(*ref), state)
        await index.aclose()
        await storage.aclose()

        resident = ResidentVectors()
        storage, index = StorageSink(tmp_path / "v.db", resident=resident), IndexSink(resident=resident)
        await storage.open(log)
        assert (await index.open(log)).cursor.next_offset == log.next_offset
        assert len(index.search([1, 1], 100)) == 7
        await storage.aclose()

    anyio.run(main)


def test_index_over_evicted_rows_stops(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        resident = ResidentVectors(resident_bytes_max=5_000)
        storage = StorageSink(tmp_path / "v.db", resident=resident)
        await storage.open(log)
        log.append(*(Delta(f"v{number}", create([1, 2, 3, 4])) for number in range(50)))
        await storage.apply(log.deliveries())
        with pytest.raises(StopSink, match="resident_bytes_max 5000 is too small for all vectors"):
            await IndexSink(resident=resident).open(log)
        await storage.aclose()

    anyio.run(main)
