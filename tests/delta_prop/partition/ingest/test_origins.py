"""`Origins`: epochs, claims, first offsets, checksums of duplicates, and bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from delta_prop.partition.ingest.epochs import CLAIMED_EPOCH_MAX, EPOCH_MAX, epoch_limit, openings_for
from delta_prop.partition.ingest.origins import IDLE_S_MAX, NOOPS_MAX, RECENT_BATCHES, Origins, OriginState
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import batch_of

ORIGIN = 0xFFFF_FFFF_FFF0_0002
OTHER = 5


def rows(count: int, content: bytes = b"x") -> list[Delta]:
    return [Delta("v", opaque(content))] * count


def batch(base: int, count: int = 1, **more: Any) -> Any:
    return batch_of(ORIGIN, base, *rows(count, more.pop("content", b"x")), **more)


def refusal_of(origins: Origins, refused: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        origins.require(refused, "p")
    return caught.value


# --- epochs


def test_each_hello_grants_the_next_epoch_and_fences_the_last() -> None:
    origins = Origins()
    assert refusal_of(origins, batch(1)).code is ErrorCode.UNKNOWN_ORIGIN
    assert [origins.hello(ORIGIN, "p", 0.0).epoch for _ in range(3)] == [1, 2, 3]
    assert origins.require(batch(1, epoch=3), "p").epoch == 3
    fenced = refusal_of(origins, batch(1, epoch=2))
    assert (fenced.code, fenced.details["epoch"]) == (ErrorCode.FENCED, 3)
    assert refusal_of(origins, batch(1, epoch=4)).code is ErrorCode.UNKNOWN_ORIGIN
    assert len(origins) == 1


def test_idle_origin_is_deactivated_and_keeps_its_epoch() -> None:
    origins = Origins()
    state = origins.hello(ORIGIN, "p", 0.0)
    origins.hello(OTHER, "q", 1.0)
    origins.note_appended(state, batch(1), 0, 100.0)
    assert origins.deactivate_idle(IDLE_S_MAX + 50) == 1  # the origin that wrote last stays active
    assert origins.get(OTHER) is None
    assert origins.deactivate_idle(IDLE_S_MAX + 100) == 1
    assert refusal_of(origins, batch(2)).code is ErrorCode.UNKNOWN_ORIGIN
    assert len(origins) == 2
    assert origins.hello(ORIGIN, "p", IDLE_S_MAX + 200).epoch == 2


# --- bounds


def test_origins_are_bounded_per_owner_and_in_total() -> None:
    origins = Origins(origins_max=5, per_owner_max=3)
    for number in range(3):
        origins.hello(number, "p", 0.0)
    with pytest.raises(Refused, match="origins of 'p': 3 of 3") as caught:
        origins.check_capacity([3], "p")
    assert caught.value.code is ErrorCode.RATE_LIMITED
    assert caught.value.retry_after_ms
    # a forwarder may bring any number of other producers' origins
    origins.check_capacity([3], "p", bounded=False)
    origins.check_capacity([1, 2], "p")
    assert origins.hello(1, "p", 0.0).epoch == 2  # the origin exists already
    for number in (3, 4):
        origins.hello(number, "q", 0.0)
    with pytest.raises(Refused, match="5 of 5 in total"):
        origins.check_capacity([5], "r")
    assert len(origins) == 5


def test_first_offsets_are_bounded_over_all_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_prop.partition.ingest.origins.OFFSET_RANGES_MAX", 100)
    origins = Origins()
    state = origins.hello(ORIGIN, "p", 0.0)
    # Rows of others lie between the batches, so each batch is a range of its own.
    for number in range(1, 501):
        origins.note_appended(state, batch(number), 3 * number, 0.0)
    assert state.first_offset(500) == 1500
    assert state.first_offset(470) == 1410
    assert state.first_offset(1) is None
    assert state.range_count <= 100


# --- first offsets


def test_first_offsets_of_random_batches_match_a_dict() -> None:
    random = Random(7)
    state, expected = OriginState("p", 1, 0.0), {}
    counter, offset, range_count = 1, 0, 0
    for _ in range(300):
        offset += random.choice((0, 0, 1, 5))
        count = random.randint(1, 4)
        counters = None
        if random.random() < 0.2:
            counters = sorted(random.sample(range(counter, counter + 10), count))
            appended = batch(counters[0], count, counters=counters, previous=counter - 1)
        else:
            appended = batch(counter, count)
        range_count += state.note_appended(appended, offset)
        expected |= {appended.counter(row): offset + row for row in range(count)}
        counter, offset = appended.last + 1, offset + count
    assert {
        appended_counter: state.first_offset(appended_counter) for appended_counter in expected
    } == expected
    assert range_count == state.range_count < len(expected)


def test_duplicate_id_rows_point_to_the_first_copy() -> None:
    state = OriginState("p", 1, 0.0)
    state.note_appended(batch(1, 3), 10, {0: 0, 1: 7, 2: None})
    assert [state.first_offset(counter) for counter in (1, 2, 3)] == [0, 7, None]


# --- duplicates and no-ops


def test_checksum_distinguishes_duplicate_from_reuse() -> None:
    state = OriginState("p", 1, 0.0)
    state.note_appended(batch(1, 2), 0)
    assert state.is_same_frame(batch(1, 2)) is True
    assert state.is_same_frame(batch(1, 2, content=b"other")) is False
    assert state.is_same_frame(batch(1, 1)) is None, "the checksum of other rows should prove nothing"
    for number in range(3, 3 + 2 * RECENT_BATCHES):
        state.note_appended(batch(number), number)
    assert state.is_same_frame(batch(2 + 2 * RECENT_BATCHES, content=b"other")) is False
    assert state.is_same_frame(batch(1, 2)) is None, "the checksum of an old batch should be forgotten"


def test_noop_ranges_keep_their_codes_and_are_bounded() -> None:
    state = OriginState("p", 1, 0.0)
    state.note_noop(batch(5, 3), ErrorCode.INVALID_DELTA)
    state.note_noop(batch(10), ErrorCode.CONFLICT)
    noops = [state.first_noop(batch(counter)) for counter in (4, 5, 7, 8, 10, 11)]
    invalid, conflict = ErrorCode.INVALID_DELTA, ErrorCode.CONFLICT
    assert noops == [None, (5, invalid), (7, invalid), None, (10, conflict), None]
    assert state.first_noop(batch(1, 20)) == (5, invalid)
    assert state.first_noop(batch(6, 20)) == (6, invalid)
    assert state.first_noop(batch(8, 20)) == (10, conflict)
    refused = batch(20)
    for _ in range(NOOPS_MAX):
        state.note_noop(refused, ErrorCode.INVALID_DELTA)
    assert len(state._noops[0]) <= NOOPS_MAX


class TestClaims:
    """A hello on the network names the epoch that its producer holds."""

    def test_current_epoch_is_granted_unchanged(self) -> None:
        origins = Origins()
        epoch = origins.claim(1, 0, "a", 0.0, 0).epoch
        assert origins.claim(1, epoch, "a", 1.0, 5).epoch == epoch
        assert origins.claim(1, 0, "a", 2.0, 5).epoch == epoch + 1

    def test_lower_epoch_is_fenced(self) -> None:
        origins = Origins()
        first = origins.claim(1, 0, "a", 0.0, 0).epoch
        origins.claim(1, 0, "a", 1.0, 0)
        with pytest.raises(Refused) as caught:
            origins.claim(1, first, "a", 2.0, 0)
        assert caught.value.code is ErrorCode.FENCED

    def test_claim_by_another_owner_is_refused(self) -> None:
        origins = Origins()
        epoch = origins.claim(1, 0, "a", 0.0, 0).epoch
        for claimed in (0, epoch):
            with pytest.raises(Refused) as caught:
                origins.claim(1, claimed, "b", 1.0, 0)
            assert caught.value.code is ErrorCode.UNAUTHORIZED

    def test_epoch_granted_before_a_restart_stays_valid(self) -> None:
        granted = Origins(epoch_floor=100).claim(1, 0, "a", 0.0, 0).epoch
        restarted = Origins(epoch_floor=200)
        restarted.restore(1, 50, 0.0)
        assert restarted.claim(1, granted, "a", 0.0, 7).epoch == granted
        assert restarted.claim(1, 0, "a", 1.0, 7).epoch == 201

    @pytest.mark.parametrize("known", [0, 3])
    def test_unknown_epoch_is_granted_as_claimed(self, known: int) -> None:
        origins = Origins()
        if known:
            origins.restore(1, known, 0.0)
        assert origins.claim(1, 6, "a", 0.0, 7).epoch == 6
        assert origins.claim(1, 6, "a", 0.0, 7).epoch == 6
        assert origins.claim(1, 0, "a", 1.0, 7).epoch == 7

    @pytest.mark.parametrize("epoch", [CLAIMED_EPOCH_MAX + 1, EPOCH_MAX])
    def test_claim_near_the_last_epoch_is_refused(self, epoch: int) -> None:
        origins = Origins()
        with pytest.raises(Refused, match=r"claims up to 2147483648: claim with epoch 0") as caught:
            origins.claim(1, epoch, "a", 0.0, 0)
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.BAD_REQUEST, False)
        assert origins.get(1) is None
        assert origins.claim(1, CLAIMED_EPOCH_MAX, "a", 0.0, 0).epoch == CLAIMED_EPOCH_MAX
        assert origins.claim(1, 0, "a", 0.0, 0).epoch == CLAIMED_EPOCH_MAX + 1

    def test_unreserved_epoch_is_granted_once_reserved(self) -> None:
        origins = Origins(epoch_floor=4_096, epoch_limit=8_192)
        for epoch in (8_193, 100_000):
            with pytest.raises(Refused) as caught:
                origins.claim(1, epoch, "a", 0.0, 0)
            assert (caught.value.code, caught.value.retryable) == (ErrorCode.RATE_LIMITED, True)
            assert origins.epoch_requested >= epoch
        origins.note_reserved(epoch_limit(openings_for(origins.epoch_requested)))
        assert origins.epoch_requested == 0
        assert origins.claim(1, 100_000, "a", 0.0, 0).epoch == 100_000

    def test_last_epoch_has_no_successor(self) -> None:
        origins = Origins()
        origins.restore(1, EPOCH_MAX, 0.0)
        with pytest.raises(Refused, match="used up") as caught:
            origins.claim(1, 0, "a", 0.0, 0)
        assert caught.value.code is ErrorCode.BAD_REQUEST
        assert origins.claim(1, EPOCH_MAX, "a", 0.0, 0).epoch == EPOCH_MAX

    def test_deactivated_epoch_of_a_checkpoint_stays_valid(self) -> None:
        origins = Origins()
        origins.restore_states({}, {1: 5})
        assert origins.claim(1, 5, "a", 0.0, 0).epoch == 5
        with pytest.raises(Refused, match="another producer"):
            origins.claim(1, 5, "b", 0.0, 0)

    def test_deactivated_origin_returns_with_its_epoch(self) -> None:
        origins = Origins()
        epoch = origins.claim(1, 0, "a", 0.0, 0).epoch
        assert origins.deactivate_idle(1e9) == 1
        assert origins.claim(1, epoch, "a", 1e9, 9).epoch == epoch
        assert len(origins) == 1


def test_first_offset_above_a_counter_is_exact_or_lower() -> None:
    state = OriginState("p", 1, 0.0)
    for base, offset in ((1, 10), (3, 20)):
        state.note_appended(batch(base, 2), offset)
    assert [state.first_offset_above(counter) for counter in range(5)] == [10, 11, 20, 21, None]
    # For ids accepted earlier, the state remembers the offsets of their first copies.
    state.note_appended(batch(5, 2), 30, {0: 3, 1: None})
    assert state.first_offset_above(4) == 22
    state.note_appended(batch(7, 2), 40)
    assert state.first_offset_above(6) == 40
    state.drop_older_ranges()
    assert state.first_offset_above(0) is None
    assert state.first_offset_above(7) == 41


def test_first_offset_above_a_counter_from_before_idleness_is_unknown() -> None:
    state = OriginState("p", 1, 0.0, known_above=5)
    state.note_appended(batch(6, 2), 10)
    assert state.first_offset_above(3) is None
    assert state.first_offset_above(5) == 10
