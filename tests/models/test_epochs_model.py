"""Epochs over many lives of a log: none is held twice, a new one is above all before, whatever was lost."""

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

from delta_prop.ingest.epochs import CLAIMED_EPOCH_MAX, EPOCH_MAX, epoch_floor, epoch_limit, openings_for
from delta_prop.ingest.origins import Origins
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

ORIGIN, OWNER = 7, "me"
WHO = st.integers(0, 1 << 20)


class Epochs(RuleBasedStateMachine):
    """One origin, its holders, and a log that is closed, killed and recovered."""

    @initialize(openings=st.sampled_from([0, 1, 1_000, 600_000]))
    def begin(self, openings: int) -> None:
        self.openings = openings  # as the disk has it
        self.durable = 0  # the highest epoch of a batch that is on stable storage
        self.holders: list[int] = []  # what each was granted last
        self.highest = 0
        self.origins = self.opened()

    def opened(self) -> Origins:
        origins = Origins(epoch_floor=epoch_floor(self.openings), epoch_limit=epoch_limit(self.openings))
        if self.durable:
            origins.restore(ORIGIN, self.durable, 0.0)
        return origins

    def claimed(self, epoch: int) -> int:
        """Claim until it is granted, as clients do. Raises Refused."""
        try:
            return self.origins.claim(ORIGIN, epoch, OWNER, 0.0, 0).epoch
        except Refused as refused:
            if not refused.retryable:
                raise
        self.keep_house()
        return self.origins.claim(ORIGIN, epoch, OWNER, 0.0, 0).epoch

    def granted(self, epoch: int) -> None:
        assert epoch not in self.holders, "two hold it"
        self.holders.append(epoch)
        self.highest = max(self.highest, epoch)

    @rule()
    def say_hello(self) -> None:
        epoch = self.claimed(0)
        assert epoch > self.highest, "it is above all before, in whichever life"
        assert epoch <= EPOCH_MAX
        self.granted(epoch)

    @rule(count=st.sampled_from([1_000, 5_000]))
    def say_hello_again_and_again(self, count: int) -> None:
        for _ in range(count):
            epoch = self.claimed(0)
            assert epoch > self.highest
            self.highest = epoch
        self.granted(epoch)

    @precondition(lambda self: self.holders)
    @rule(who=WHO)
    def connect_again(self, who: int) -> None:
        held = self.holders[who % len(self.holders)]
        state = self.origins.get(ORIGIN)
        present = 0 if state is None else state.epoch
        if held < present:
            with pytest.raises(Refused) as refused:
                self.claimed(held)
            assert refused.value.code is ErrorCode.FENCED
        else:
            assert self.claimed(held) == held, "nobody else has had it"

    @rule(above=st.sampled_from([1, 2, 6, 4_096, 5_000, 1 << 20]))
    def bring_an_epoch_of_another_history(self, above: int) -> None:
        epoch = self.highest + above
        if epoch > max(CLAIMED_EPOCH_MAX, epoch_floor(self.openings)):
            return
        granted = self.claimed(epoch)
        assert granted >= epoch
        self.granted(granted)

    @rule(epoch=st.integers(CLAIMED_EPOCH_MAX + 1, EPOCH_MAX))
    def bring_one_that_would_leave_none(self, epoch: int) -> None:
        if epoch <= epoch_floor(self.openings) or epoch <= self.highest:
            return
        before = self.origins.get(ORIGIN)
        with pytest.raises(Refused) as refused:
            self.claimed(epoch)
        assert refused.value.code is ErrorCode.BAD_REQUEST
        assert self.origins.get(ORIGIN) is before

    @precondition(lambda self: self.holders)
    @rule(who=WHO, kept=st.booleans())
    def write(self, who: int, kept: bool) -> None:
        held = self.holders[who % len(self.holders)]
        state = self.origins.get(ORIGIN)
        batch = encode_batch([Delta("a", create([1.0]))], origin=ORIGIN, base=1, epoch=held)
        if state is None or state.epoch != held or state.owner != OWNER:
            with pytest.raises(Refused):
                self.origins.require(batch, OWNER)
            return
        self.origins.require(batch, OWNER)
        self.durable = held if kept else self.durable

    @rule()
    def start_again(self) -> None:
        self.openings += 1
        self.origins = self.opened()

    @rule()
    def recover_in_place(self) -> None:
        self.openings += 1
        before, self.origins = self.origins, self.opened()
        self.origins.carry_over(before)

    @rule()
    def keep_house(self) -> None:
        if self.origins.epoch_requested:
            self.openings = max(self.openings, openings_for(self.origins.epoch_requested))
            self.origins.note_reserved(epoch_limit(self.openings))


def test_epochs_are_never_held_twice_and_rise_over_all_lives() -> None:
    run_state_machine_as_test(Epochs)
