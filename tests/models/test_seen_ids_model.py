"""SeenIds against a dict that drops nothing: in memory, on disk, merged, forgotten, after restarts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.partition.ingest import id_runs
from delta_prop.partition.ingest.seen_ids import FEW_IDS, SeenIds
from tests.delta_prop.partition.ingest.id_store import IdStore
from tests.delta_prop.partition.ingest.test_seen_ids import id_with_hash

ids = st.integers(0, 150).map(lambda number: id_with_hash(number % 40 << 58, number))
"""Ids of which some share a hash."""


class SeenIdsMachine(RuleBasedStateMachine):
    """Adds the unknown ids of each appended batch, and looks up any ids at any time."""

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
        self.forgotten_below = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(batch=st.lists(ids, max_size=40), gap=st.integers(0, 5), explicit_offsets=st.booleans())
    def publish(self, batch: list[bytes], gap: int, explicit_offsets: bool) -> None:
        self.offset += gap
        pairs = zip(batch, self.seen.find(batch), strict=True)
        new_ids = (id_ for id_, offset in pairs if offset is None)
        new = list(dict.fromkeys(new_ids))  # a batch holds each id once
        for row, id_ in enumerate(new):
            if self.model.get(id_, -1) < self.seen.kept_since:  # forgotten, so it counts as new
                self.model.pop(id_, None)
            assert id_ not in self.model
            self.model[id_] = self.offset + row
        if explicit_offsets:
            self.seen.add_at(new, range(self.offset, self.offset + len(new)))
        else:
            self.seen.add(new, self.offset)
        self.offset += len(new)

    @rule(batch=st.lists(ids, min_size=1, max_size=FEW_IDS + 40))
    def find(self, batch: list[bytes]) -> None:
        offsets = self.seen.find(batch)
        assert [self.seen.find([id_])[0] for id_ in batch] == offsets
        assert [id_ in self.seen for id_ in batch] == [offset is not None for offset in offsets]
        for id_, offset in zip(batch, offsets, strict=True):
            known = self.model.get(id_)
            assert offset == known or (offset is None and known is not None and known < self.seen.kept_since)

    @rule(distance=st.integers(0, 100))
    def forget(self, distance: int) -> None:
        self.forgotten_below = max(self.forgotten_below, self.offset - distance)
        self.seen.forget_below(self.offset - distance)

    @rule()
    def write(self) -> None:
        self.stored.write(self.seen)
        assert self.seen.waiting_run_count == 0

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
    def retained_ids_are_found(self) -> None:
        if not hasattr(self, "seen"):
            return
        retained = {id_: offset for id_, offset in self.model.items() if offset >= self.seen.kept_since}
        assert self.seen.find(list(retained)) == list(retained.values())
        assert self.seen.kept_since <= self.forgotten_below
        statistics = self.seen.statistics()
        assert statistics.ids >= max(len(retained), min(len(self.model), self.settings["retained_min"]))
        assert statistics.ids_open < 2 * self.generation_ids + 1
        in_files = [run for run in self.seen.runs if not run.is_in_memory]
        bytes_held = sum(run.nbytes for run in in_files)
        assert bytes_held <= max(self.settings["index_bytes_max"], id_runs.FENCE_BYTES * len(in_files))


TestSeenIdsModel = SeenIdsMachine.TestCase
