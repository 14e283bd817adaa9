"""The benchmark of mixed traffic: its frames are valid, and its shares compare rates of the same round."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import mix
from benchmarks._peers_ours import with_counter
from benchmarks.mix import (
    BY_BATCH,
    BY_ROW,
    DIMENSION,
    EMBEDDED,
    KEYS,
    NAMESPACES,
    ONE_KIND,
    SERVER,
    TEMPLATES,
    TRAFFICS,
    Traffic,
)
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import AckLevel, Kind
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.validate import validate_batch


def batches(traffic: Traffic, count: int) -> list[tuple[set[str], set[int]]]:
    """Return the namespaces and the kinds of each of the first `count` batches."""
    namespaces_and_kinds = []
    for batch in islice(traffic.batches("t", NAMESPACES * 4, 16, AckLevel.LOGGED, 1), count):
        rows = [batch.delta(row) for row in range(batch.count)]
        namespaces_and_kinds.append(
            ({delta.namespace for delta in rows}, {int(delta.operation.kind) for delta in rows})
        )
    return namespaces_and_kinds


def test_mixture_covers_all_namespaces_and_kinds_by_row_or_by_batch() -> None:
    by_row = batches(BY_ROW, 3)
    assert all((len(spaces), len(kinds)) == (NAMESPACES, 4) for spaces, kinds in by_row)
    by_batch = batches(BY_BATCH, TEMPLATES)
    assert all((len(spaces), len(kinds)) == (1, 1) for spaces, kinds in by_batch)
    assert len({(*spaces, *kinds) for spaces, kinds in by_batch}) == TEMPLATES == NAMESPACES * 4
    assert [batches(traffic, 1)[0] for traffic in ONE_KIND] == [
        ({"t-0"}, {int(kind)}) for kind in (2, 1, 7, 8)
    ]


@pytest.mark.parametrize("traffic", TRAFFICS, ids=lambda traffic: traffic.name)
def test_frames_are_valid_and_vectors_exist_first(traffic: Traffic) -> None:
    created = {(delta.namespace, delta.vector_id) for delta in traffic.create_deltas("t")}
    assert len(created) == KEYS
    template = next(iter(traffic.batches("t", 80, 16, AckLevel.LOGGED, 1)))
    batch = parse_batch(bytes(with_counter(encode(BatchFrame(1, template)), 321).body))
    validate_batch(batch)
    assert (batch.base, batch.count) == (321, 80)
    for delta in (batch.delta(row) for row in range(batch.count)):
        if delta.operation.kind != Kind.OPAQUE:
            assert (delta.namespace, delta.vector_id) in created
        values, indices = delta.operation.values, delta.operation.indices
        size = len(delta.operation.data) if values is None else values.nbytes
        assert size + (0 if indices is None else indices.nbytes) == 4 * DIMENSION


def test_shares_are_relative_to_mean_of_single_kinds() -> None:
    rates = {(target, traffic.name): [2.0, 4.0, 4.0] for target in (SERVER, EMBEDDED) for traffic in ONE_KIND}
    rates |= {
        (target, traffic.name): [1.0, 3.0, 4.0]
        for target in (SERVER, EMBEDDED)
        for traffic in (BY_ROW, BY_BATCH)
    }
    results = mix._report(rates, lost=0)
    assert [goal["found"]["median"] for goal in results.goals] == [0.75] * 4
    assert {goal["verdict"] for goal in results.goals} == {"reached"}
    assert not results.has_failed
    assert mix._report(rates, lost=2).has_failed
