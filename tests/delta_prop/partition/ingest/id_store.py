"""Runs of ids on a simulated disk, written as a service does, but synchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.partition.ingest.id_merging import RunMerge, choose_runs
from delta_prop.partition.state.id_run_store import open_run
from delta_prop_broker.recovery.checkpoints import Checkpoints
from delta_prop_simulations.disk import SimDisk

if TYPE_CHECKING:
    from delta_prop.partition.ingest.id_runs import IdRun
    from delta_prop.partition.ingest.seen_ids import SeenIds


class IdStore:
    """A simulated disk with runs of ids."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.disk.make_directory("x")
        self.checkpoints = Checkpoints(self.disk, "x", bytes(16))

    def write(self, seen: SeenIds) -> None:
        """Write all sealed runs."""
        for run in seen.runs:
            if run.is_in_memory:
                written = self._write_run(run)
                written.filter = run.filter
                seen.replace_runs([run], [written])

    def merge(self, seen: SeenIds) -> bool:
        """Merge one group of runs; return False if no runs are due for a merge."""
        runs = choose_runs(seen.runs, seen.generation_ids)
        if not runs or any(run.is_in_memory for run in runs):
            return False
        merge = RunMerge(runs, seen.error_rate)
        writer = self.checkpoints.begin_file(self.checkpoints.free_name(0, "merged"))
        while not merge.is_done:
            for chunk in merge.step():
                writer.add(chunk)
        part = writer.finish()
        merge.close()
        path = self.checkpoints.path_of(part)
        seen.replace_runs(runs, [merge.result(self.checkpoints.open_file(part), part, path)])
        return True

    def load_filters(self, seen: SeenIds) -> None:
        """Load filters until the memory bound is reached."""
        while (run := seen.next_filter_to_load()) is not None:
            run.filter = run.load_filter()

    def reopen(self, runs: list[IdRun]) -> list[IdRun]:
        """Open the same runs, as a restarted process does."""
        return [
            open_run(self.checkpoints, run.checkpoint_file) for run in runs if run.checkpoint_file is not None
        ]

    def path(self, run: IdRun) -> str:
        """Return the path of a run's file."""
        assert run.checkpoint_file is not None
        return self.checkpoints.path_of(run.checkpoint_file)

    def _write_run(self, run: IdRun) -> IdRun:
        name = self.checkpoints.free_name(run.facts.last_offset, "run")
        return open_run(self.checkpoints, self.checkpoints.write_file(name, run.chunks()))
