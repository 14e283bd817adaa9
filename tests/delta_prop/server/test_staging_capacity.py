"""`StagingCapacity`: the bytes that may be staged, wait for the disk, and be on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from delta_prop.server.job_table import UNWRITTEN_BYTES_MAX, StagingCapacity
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


def make_capacity(*, free_bytes: int, staged_bytes_max: int = 1 << 60) -> StagingCapacity:
    """Return the capacity on a disk of which 100 bytes are reserved."""
    log = SimpleNamespace(settings=SimpleNamespace(free_bytes_min=60), reserve=SimpleNamespace(missing=40))
    storage: Any = SimpleNamespace(log=log)
    capacity = StagingCapacity(storage, staged_bytes_max=staged_bytes_max)
    capacity.note_free(free_bytes)
    return capacity


def refusal(capacity: StagingCapacity, size: int, staged_bytes: int = 0) -> Refused:
    with pytest.raises(Refused) as caught:
        capacity.check(size, staged_bytes)
    return caught.value


def test_all_jobs_together_are_bounded() -> None:
    capacity = make_capacity(free_bytes=1_000, staged_bytes_max=50)
    capacity.check(20, staged_bytes=30)
    assert "staged_bytes_max" in refusal(capacity, 21, staged_bytes=30).message
    assert not capacity.must_check_disk


def test_unwritten_bytes_are_bounded_except_for_a_single_batch() -> None:
    capacity = make_capacity(free_bytes=1 << 40)
    capacity.check(UNWRITTEN_BYTES_MAX + 1, 0)
    capacity.unwritten_bytes = 1
    capacity.check(UNWRITTEN_BYTES_MAX - 1, 0)
    assert refusal(capacity, UNWRITTEN_BYTES_MAX, 0).retryable
    capacity.note_written(1, None)
    capacity.check(UNWRITTEN_BYTES_MAX, 0)


def test_full_disk_is_asked_for_its_free_bytes() -> None:
    capacity = make_capacity(free_bytes=150)
    capacity.check(50, 0)
    capacity.unwritten_bytes = 30
    refused = refusal(capacity, 21)
    assert "150 bytes are free, 100 of them reserved" in refused.message
    assert refused.code is not ErrorCode.INVALID_DELTA
    assert capacity.must_check_disk
    capacity.note_written(30, None)
    assert "120 bytes are free" in refusal(capacity, 21).message
    capacity.note_written(0, 500)
    capacity.check(400, 0)
