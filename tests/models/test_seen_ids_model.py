"""Seen ids beside a dict that forgets nothing."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.ingest.seen_ids import FEW, SeenIds

ids = st.integers(0, 150).map(lambda number: number.to_bytes(16, "little"))


class SeenIdsBesideADict(RuleBasedStateMachine):
    """Each id is added where it is not known, as its batch is appended; all are asked for at any time."""

    @initialize(
        generation_ids=st.integers(4, 30),
        generations_max=st.sampled_from([1, 3, 1_000]),
        error_rate=st.sampled_from([0.001, 0.4]),
    )
    def start(self, generation_ids: int, generations_max: int, error_rate: float) -> None:
        self.seen = SeenIds(
            generation_ids=generation_ids, generations_max=generations_max, error_rate=error_rate
        )
        self.generation_ids = generation_ids
        self.unbounded = generations_max == 1_000
        self.model: dict[bytes, int] = {}
        self.offset = 0
        self.forgot_below = 0

    @rule(batch=st.lists(ids, max_size=40), gap=st.integers(0, 5), explicit=st.booleans())
    def publish(self, batch: list[bytes], gap: int, explicit: bool) -> None:
        self.offset += gap
        found = zip(batch, self.seen.find(batch), strict=True)
        new = list(dict.fromkeys(one for one, at in found if at is None))  # a batch has each id once
        for row, one in enumerate(dict.fromkeys(new)):
            if self.model.get(one, -1) < self.seen.kept_since:  # forgotten: new again
                self.model.pop(one, None)
            assert one not in self.model
            self.model[one] = self.offset + (row if explicit else new.index(one))
        if explicit:
            unique = list(dict.fromkeys(new))
            self.seen.add_at(unique, range(self.offset, self.offset + len(unique)))
        else:
            self.seen.add(new, self.offset)
        self.offset += len(new)

    @rule(batch=st.lists(ids, min_size=1, max_size=FEW + 40))
    def ask(self, batch: list[bytes]) -> None:
        found = self.seen.find(batch)
        assert [self.seen.find([one])[0] for one in batch] == found
        assert [one in self.seen for one in batch] == [at is not None for at in found]
        for one, at in zip(batch, found, strict=True):
            known = self.model.get(one)
            assert at == known or (at is None and known is not None and known < self.seen.kept_since)

    @rule(back=st.integers(0, 100))
    def forget(self, back: int) -> None:
        self.forgot_below = max(self.forgot_below, self.offset - back)
        self.seen.forget_below(self.offset - back)

    @invariant()
    def all_above_the_horizon_is_kept(self) -> None:
        kept = {one: at for one, at in self.model.items() if at >= self.seen.kept_since}
        assert self.seen.find(list(kept)) == list(kept.values())
        if self.unbounded:
            assert self.seen.kept_since <= self.forgot_below
        statistics = self.seen.statistics()
        assert statistics.ids >= len(kept)
        assert statistics.ids_open < 2 * self.generation_ids + 1


TestSeenIdsBesideADict = SeenIdsBesideADict.TestCase
