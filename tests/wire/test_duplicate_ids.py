"""Duplicate ids: of several deltas with one id, the canonically first has an effect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.delta import KnownIds, create, scale
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates

ONE, OTHER = b"1" * 16, b"2" * 16


def identified_delta(
    lamport: int, offset: int, known_ids: KnownIds = KnownIds.ALL, id_: bytes = ONE
) -> IdentifiedDelta:
    return IdentifiedDelta(id_, (lamport, 1, offset + 1), offset, known_ids)


def duplicate_lamports(*deltas: IdentifiedDelta | None, complete: bool = True) -> list[int]:
    return sorted(key[0] for key in find_duplicates(deltas, complete=complete))


def test_canonically_first_delta_has_the_effect_at_any_offset() -> None:
    first = identified_delta(7, 0, KnownIds.NONE)
    assert duplicate_lamports(first, identified_delta(9, 1), identified_delta(3, 2)) == [7, 9]
    assert duplicate_lamports(first, identified_delta(9, 1, KnownIds.SOME)) == [9]
    assert duplicate_lamports(first, identified_delta(9, 1, id_=OTHER), None) == []


def test_forgotten_id_counts_as_new() -> None:
    first, forgotten = identified_delta(3, 0, KnownIds.NONE), identified_delta(9, 1, KnownIds.NONE)
    assert duplicate_lamports(first, forgotten) == []
    assert duplicate_lamports(first, forgotten, identified_delta(5, 2)) == [5]


def test_known_id_has_no_effect_if_its_first_copy_may_be_removed() -> None:
    assert duplicate_lamports(identified_delta(5, 8), identified_delta(4, 9), complete=False) == [4, 5]
    assert duplicate_lamports(identified_delta(5, 8), identified_delta(4, 9), complete=True) == [5]
    # Only some ids of that frame are known, maybe not this one: a delta that may be new has its effect.
    assert duplicate_lamports(
        identified_delta(5, 8, KnownIds.SOME), identified_delta(4, 9), complete=False
    ) == [5]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([ONE, OTHER])), unique_by=lambda row: row[0]))
def test_services_agree_on_duplicates_in_any_arrival_order(
    rows: list[tuple[int, bytes]],
) -> None:
    def duplicates_in(order: list[tuple[int, bytes]]) -> list[int]:
        earlier_ids: set[bytes] = set()
        deltas = []
        for offset, (lamport, id_) in enumerate(order):
            known_ids = KnownIds.ALL if id_ in earlier_ids else KnownIds.NONE
            deltas.append(IdentifiedDelta(id_, (lamport, 1, lamport), offset, known_ids))
            earlier_ids.add(id_)
        return duplicate_lamports(*deltas)

    later = [
        lamport
        for lamport, id_ in rows
        if any(other < lamport and id_ == other_id for other, other_id in rows)
    ]
    assert duplicates_in(rows) == duplicates_in(rows[::-1]) == sorted(later)


def test_delta_without_effect_is_counted_and_advances_the_key() -> None:
    rows = [((1, 1, 1), create([1, 2]), None), ((2, 1, 2), scale(3), {"a": 1}), ((3, 2, 1), scale(3), None)]
    state = fold(rows, without_effect={(2, 1, 2)})
    assert state.content == VectorState(True, create([3, 6]).values).content
    assert (state.ignored, state.key) == (1, (3, 2, 1))
    assert fold(rows[:2], without_effect={(2, 1, 2)}).key == (2, 1, 2)
