"""`JobTable`: which jobs and attempts there are, and how they are counted."""

from __future__ import annotations

import pytest

from delta_prop.calls.receipt import Receipt
from delta_prop.server import job_table
from delta_prop.server.job_table import Job, JobTable
from delta_prop.server.part_file import PartHead, PartPosition
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.session_fakes import rows_batch


def make_table() -> tuple[JobTable, Job]:
    table, job = JobTable(), Job("nightly", "loader", 1)
    table.load((), (), {}, 1)
    table.add(job)
    return table, job


def head(part: int = 0, attempt: int = 1) -> PartHead:
    return PartHead("nightly", part, attempt, 0, 0, "loader", 1)


def test_jobs_on_disk_are_unknown_until_they_are_loaded() -> None:
    table = JobTable()
    with pytest.raises(Refused):
        table.find("nightly", "loader")
    table.load((), (), {}, 1)
    assert table.find("nightly", "loader") is None


def test_job_belongs_to_its_owner() -> None:
    table, job = make_table()
    assert table.find("nightly", "loader") is job
    with pytest.raises(Refused) as caught:
        table.find("nightly", "other")
    assert caught.value.code is ErrorCode.UNAUTHORIZED


def test_job_ends_with_its_last_attempt() -> None:
    table, job = make_table()
    first, second = (table.add_attempt(job, head(part)) for part in (0, 1))
    assert (table.attempt_count, table.counts.active) == (2, 1)
    table.forget_attempt(first)
    assert (table.attempt_count, table.jobs) == (1, {"nightly": job})
    table.forget_attempt(second)
    assert (table.attempt_count, table.counts.active, table.jobs) == (0, 0, {})


def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "ATTEMPTS_MAX", 1)
    table, job = make_table()
    table.check_attempts()
    table.add_attempt(job, head())
    with pytest.raises(Refused, match="attempts of parts"):
        table.check_attempts()


def test_staged_bytes_are_counted_once_and_not_after_a_drop() -> None:
    table, job = make_table()
    attempt = table.add_attempt(job, head())
    batch = rows_batch(2, 1)
    attempt.add(batch, Receipt())
    table.count_staged_bytes(attempt)
    table.count_staged_bytes(attempt)
    assert table.counts.staged_bytes == batch.size
    attempt.on_written(attempt.take_pending(), PartPosition(counter=2, byte_offset=batch.size + 9))
    table.count_staged_bytes(attempt)
    assert table.counts.staged_bytes == batch.size + 9
    job.attempts.clear()
    attempt.add(rows_batch(1, 3), Receipt())
    table.count_staged_bytes(attempt)
    assert table.counts.staged_bytes == batch.size + 9
