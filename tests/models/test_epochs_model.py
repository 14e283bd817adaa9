"""Epochs across restarts of a log: each epoch has one holder, and is above all earlier epochs."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from delta_prop.partition.ingest.epochs import (
    CLAIMED_EPOCH_MAX,
    EPOCH_MAX,
    epoch_floor,
    epoch_limit,
    openings_for,
)
from delta_prop.partition.ingest.origins import Origins
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

ORIGIN, OWNER = 7, "me"
HOLDER_INDEXES = st.integers(0, 1 << 20)


class EpochsMachine(RuleBasedStateMachine):
    """An origin, its holders, and a log that is closed, killed and recovered."""

    @initialize(openings=st.sampled_from([0, 1, 1_000, 600_000]))
    def begin(self, openings: int) -> None:
        self.openings = openings  # as stored on the disk
        self.synced_epoch = 0  # the highest epoch of a synced batch
        self.holders: list[int] = []  # by holder: the epoch granted last
        self.highest_epoch = 0
        self.origins = self.open_origins()

    def open_origins(self) -> Origins:
        origins = Origins(epoch_floor=epoch_floor(self.openings), epoch_limit=epoch_limit(self.openings))
        if self.synced_epoch:
            origins.restore(ORIGIN, self.synced_epoch, 0.0)
        return origins

    def claim_until_granted(self, epoch: int) -> int:
        """Claim an epoch, with one retry, as clients do. Raises Refused."""
        try:
            return self.origins.claim(ORIGIN, epoch, OWNER, 0.0, 0).epoch
        except Refused as refused:
            if not refused.retryable:
                raise
        self.reserve_epochs()
        return self.origins.claim(ORIGIN, epoch, OWNER, 0.0, 0).epoch

    def note_grant(self, epoch: int) -> None:
        assert epoch not in self.holders, "no two holders may have the same epoch"
        self.holders.append(epoch)
        self.highest_epoch = max(self.highest_epoch, epoch)

    @rule()
    def say_hello(self) -> None:
        epoch = self.claim_until_granted(0)
        assert epoch > self.highest_epoch, "a new epoch must be above every earlier one, across restarts"
        assert epoch <= EPOCH_MAX
        self.note_grant(epoch)

    @rule(count=st.sampled_from([1_000, 5_000]))
    def say_hello_many_times(self, count: int) -> None:
        for _ in range(count):
            epoch = self.claim_until_granted(0)
            assert epoch > self.highest_epoch
            self.highest_epoch = epoch
        self.note_grant(epoch)

    @precondition(lambda self: self.holders)
    @rule(holder=HOLDER_INDEXES)
    def reconnect(self, holder: int) -> None:
        epoch = self.holders[holder % len(self.holders)]
        state = self.origins.get(ORIGIN)
        current = 0 if state is None else state.epoch
        if epoch < current:
            with pytest.raises(Refused) as refused:
                self.claim_until_granted(epoch)
            assert refused.value.code is ErrorCode.FENCED
        else:
            assert self.claim_until_granted(epoch) == epoch, "the holder of the highest epoch must keep it"

    @rule(distance=st.sampled_from([1, 2, 6, 4_096, 5_000, 1 << 20]))
    def claim_higher_epoch(self, distance: int) -> None:
        epoch = self.highest_epoch + distance
        if epoch > max(CLAIMED_EPOCH_MAX, epoch_floor(self.openings)):
            return
        granted = self.claim_until_granted(epoch)
        assert granted >= epoch
        self.note_grant(granted)

    @rule(epoch=st.integers(CLAIMED_EPOCH_MAX + 1, EPOCH_MAX))
    def claim_epoch_above_maximum(self, epoch: int) -> None:
        if epoch <= epoch_floor(self.openings) or epoch <= self.highest_epoch:
            return
        before = self.origins.get(ORIGIN)
        with pytest.raises(Refused) as refused:
            self.claim_until_granted(epoch)
        assert refused.value.code is ErrorCode.BAD_REQUEST
        assert self.origins.get(ORIGIN) is before

    @precondition(lambda self: self.holders)
    @rule(holder=HOLDER_INDEXES, is_synced=st.booleans())
    def write(self, holder: int, is_synced: bool) -> None:
        epoch = self.holders[holder % len(self.holders)]
        state = self.origins.get(ORIGIN)
        batch = encode_batch([Delta("a", create([1.0]))], origin=ORIGIN, base=1, epoch=epoch)
        if state is None or state.epoch != epoch or state.owner != OWNER:
            with pytest.raises(Refused):
                self.origins.require(batch, OWNER)
            return
        self.origins.require(batch, OWNER)
        self.synced_epoch = epoch if is_synced else self.synced_epoch

    @rule()
    def restart(self) -> None:
        self.openings += 1
        self.origins = self.open_origins()

    @rule()
    def recover_in_place(self) -> None:
        self.openings += 1
        before, self.origins = self.origins, self.open_origins()
        self.origins.carry_over(before)

    @rule()
    def reserve_epochs(self) -> None:
        if self.origins.epoch_requested:
            self.openings = max(self.openings, openings_for(self.origins.epoch_requested))
            self.origins.note_reserved(epoch_limit(self.openings))


def test_epochs_are_unique_and_rise_across_restarts() -> None:
    run_state_machine_as_test(EpochsMachine)
