"""SeenIds against a dict that drops nothing: in memory, on disk, merged, forgotten, after restarts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.ingest import id_runs
from delta_prop.ingest.seen_ids import FEW_IDS, SeenIds
from tests.delta_prop.ingest.id_store import IdStore
from tests.delta_prop.ingest.test_seen_ids import id_with_hash

ids = st.integers(0, 150).map(lambda number: id_with_hash(number % 40 << 58, number))
"""Some ids share a hash."""


class SeenIdsMachine(RuleBasedStateMachine):
    """Adds unknown ids when their batch is appended, and looks up any ids at any time."""

    @initialize(
        generation_ids=st.integers(4, 30),
        page_rows=st.sampled_from([1, 2, 5, 170]),
        index_bytes_max=st.sampled_from([1, 100, 500, 1 << 20]),
        error_rate=st.sampled_from([0.001, 0.4]),
        retained_min=st.sampled_from([0, 20, 60]),
    )
    def start(
        self, generation_ids: int, page_rows: int, index_bytes_max: int, error_rate: float, retained_min: int
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(id_runs, "PAGE_BYTES", 16 + 24 * page_rows)
        self.settings = {
            "generation_ids": generation_ids, "index_bytes_max": index_bytes_max, "error_rate": error_rate,
            "retained_min": retained_min,
        }  # fmt: skip
        self.seen = SeenIds(**self.settings)  # type: ignore[arg-type]
        self.stored = IdStore()
        self.generation_ids = generation_ids
        self.model: dict[bytes, int] = {}
        self.offset = 0
        self.forgot_below = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(batch=st.lists(ids, max_size=40), gap=st.integers(0, 5), explicit=st.booleans())
    def publish(self, batch: list[bytes], gap: int, explicit: bool) -> None:
        self.offset += gap
        found = zip(batch, self.seen.find(batch), strict=True)
        new = list(dict.fromkeys(one for one, at in found if at is None))  # a batch holds each id once
        for row, one in enumerate(new):
            if self.model.get(one, -1) < self.seen.kept_since:  # forgotten, so it counts as new
                self.model.pop(one, None)
            assert one not in self.model
            self.model[one] = self.offset + row
        if explicit:
            self.seen.add_at(new, range(self.offset, self.offset + len(new)))
        else:
            self.seen.add(new, self.offset)
        self.offset += len(new)

    @rule(batch=st.lists(ids, min_size=1, max_size=FEW_IDS + 40))
    def ask(self, batch: list[bytes]) -> None:
        found = self.seen.find(batch)
        assert [self.seen.find([one])[0] for one in batch] == found
        assert [one in self.seen for one in batch] == [at is not None for at in found]
        for one, at in zip(batch, found, strict=True):
            known = self.model.get(one)
            assert at == known or (at is None and known is not None and known < self.seen.kept_since)

    @rule(distance=st.integers(0, 100))
    def forget(self, distance: int) -> None:
        self.forgot_below = max(self.forgot_below, self.offset - distance)
        self.seen.forget_below(self.offset - distance)

    @rule()
    def write(self) -> None:
        self.stored.write(self.seen)
        assert self.seen.waiting_runs == 0

    @rule()
    def merge(self) -> None:
        self.stored.write(self.seen)
        self.stored.merge(self.seen)

    @rule()
    def load_filters(self) -> None:
        self.stored.load_filters(self.seen)

    @rule()
    def restart(self) -> None:
        """Restore from the runs on disk and the columns of a checkpoint."""
        self.stored.write(self.seen)
        before, self.seen = self.seen, SeenIds(**self.settings)  # type: ignore[arg-type]
        kept_since, forgotten = before.kept_since, before.forgotten
        self.seen.restore(self.stored.reopen(before.runs), kept_since=kept_since, forgotten=forgotten)
        for table in before.unsealed_tables():
            self.seen.add_at(list(table), list(table.values()))
        before.close()

    @invariant()
    def ids_above_the_horizon_are_stored(self) -> None:
        if not hasattr(self, "seen"):
            return
        above_horizon = {one: at for one, at in self.model.items() if at >= self.seen.kept_since}
        assert self.seen.find(list(above_horizon)) == list(above_horizon.values())
        assert self.seen.kept_since <= self.forgot_below
        statistics = self.seen.statistics()
        assert statistics.ids >= max(len(above_horizon), min(len(self.model), self.settings["retained_min"]))
        assert statistics.ids_open < 2 * self.generation_ids + 1
        in_files = [run for run in self.seen.runs if not run.is_in_memory]
        bytes_held = sum(run.nbytes for run in in_files)
        assert bytes_held <= max(self.settings["index_bytes_max"], id_runs.FENCE_BYTES * len(in_files))


TestSeenIdsModel = SeenIdsMachine.TestCase
