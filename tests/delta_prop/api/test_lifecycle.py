"""States of a propagator: which calls are accepted, and from which thread."""

from __future__ import annotations

import threading

import pytest

from delta_prop.api.lifecycle import Lifecycle
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode


def test_calls_are_accepted_only_between_opening_and_close() -> None:
    lifecycle = Lifecycle()
    for _ in range(2):  # it can be opened again
        with pytest.raises(UsageError, match="not open"):
            lifecycle.check()
        lifecycle.begin()
        assert lifecycle.is_open
        lifecycle.check()
        lifecycle.begin_close()
        assert not lifecycle.is_open
        with pytest.raises(Refused) as refused:
            lifecycle.check()
        assert refused.value.code is ErrorCode.SHUTTING_DOWN
        lifecycle.end_close()


def test_calls_of_another_thread_are_rejected() -> None:
    lifecycle = Lifecycle()
    thread = threading.Thread(target=lifecycle.begin)
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="another thread"):
        lifecycle.check()
