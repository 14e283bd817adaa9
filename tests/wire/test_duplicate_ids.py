"""Twins: which of the deltas with one id has the effect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.delta import KnownIds, create, scale
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates

ONE, OTHER = b"1" * 16, b"2" * 16


def twin(lamport: int, offset: int, known: KnownIds = KnownIds.ALL, id_: bytes = ONE) -> IdentifiedDelta:
    return IdentifiedDelta(id_, (lamport, 1, offset + 1), offset, known)


def found(*deltas: IdentifiedDelta | None, whole: bool = True) -> list[int]:
    return sorted(key[0] for key in find_duplicates(deltas, complete=whole))


def test_the_canonically_first_has_the_effect_wherever_it_stands_in_the_log() -> None:
    first = twin(7, 0, KnownIds.NONE)
    assert found(first, twin(9, 1), twin(3, 2)) == [7, 9]
    assert found(first, twin(9, 1, KnownIds.SOME)) == [9]
    assert found(first, twin(9, 1, id_=OTHER), None) == []


def test_an_id_that_was_known_no_longer_is_taken_for_new() -> None:
    first, forgotten = twin(3, 0, KnownIds.NONE), twin(9, 1, KnownIds.NONE)
    assert found(first, forgotten) == []
    assert found(first, forgotten, twin(5, 2)) == [5]


def test_a_first_copy_that_is_gone_has_had_the_effect_where_the_frame_says_so() -> None:
    assert found(twin(5, 8), twin(4, 9), whole=False) == [4, 5]
    assert found(twin(5, 8), twin(4, 9), whole=True) == [5]
    # Some ids of that frame: maybe not this one. What may be new is not lost.
    assert found(twin(5, 8, KnownIds.SOME), twin(4, 9), whole=False) == [5]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([ONE, OTHER])), unique_by=lambda one: one[0]))
def test_services_with_the_same_deltas_agree_in_whatever_order_they_came(
    rows: list[tuple[int, bytes]],
) -> None:
    def told(order: list[tuple[int, bytes]]) -> list[int]:
        seen: set[bytes] = set()
        deltas = []
        for offset, (lamport, one) in enumerate(order):
            known = KnownIds.ALL if one in seen else KnownIds.NONE
            deltas.append(IdentifiedDelta(one, (lamport, 1, lamport), offset, known))
            seen.add(one)
        return found(*deltas)

    later = [lamport for lamport, one in rows if any(other < lamport and one == two for other, two in rows)]
    assert told(rows) == told(rows[::-1]) == sorted(later)


def test_a_delta_without_effect_counts_and_moves_the_key() -> None:
    rows = [((1, 1, 1), create([1, 2]), None), ((2, 1, 2), scale(3), {"a": 1}), ((3, 2, 1), scale(3), None)]
    state = fold(rows, without_effect={(2, 1, 2)})
    assert state.content == VectorState(True, create([3, 6]).values).content
    assert (state.ignored, state.key) == (1, (3, 2, 1))
    assert fold(rows[:2], without_effect={(2, 1, 2)}).key == (2, 1, 2)
