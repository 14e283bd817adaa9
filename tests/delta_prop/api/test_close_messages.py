"""Messages of a propagator as it closes."""

from __future__ import annotations

import pytest

from delta_prop import Propagator, Settings
from delta_prop.testing import RecordedPropagator, run_propagator, run_virtual, virtual_world
from delta_prop_sinks import CacheSink, CallbackSink
from tests.delta_prop.support import Gate, make_delta


def test_slow_close_warns_which_sink_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Propagator(Settings(close_timeout_s=8), world=virtual_world()) as p:
            await p.attach(CacheSink())
            await p.attach(CallbackSink(Gate(), name="slow"))
            await p.publish(make_delta("a"), make_delta("b"))

    with caplog.at_level("INFO", "delta_prop"):
        run_virtual(main)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert warning.getMessage() == (
        "closing waits for sinks, for up to 8 s (close_timeout_s): 'slow' is working, 2 deltas behind"
    )


def test_slow_close_warns_with_the_failure_of_the_sink(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a wrong row\nof many words")

    async def main() -> None:
        async with Propagator(Settings(close_timeout_s=8), world=virtual_world()) as p:
            await p.attach(CallbackSink(fail, name="fails"))
            await p.publish(make_delta("a"))

    with caplog.at_level("INFO", "delta_prop"):
        run_virtual(main)
    message = next(
        record.getMessage() for record in caplog.records if record.getMessage().startswith("closing")
    )
    assert message.endswith(
        "'fails' is retrying, 1 deltas behind (TryAgain: ValueError: a wrong row of many words)"
    )


def test_quick_close_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CacheSink())
        await p.publish(make_delta("a"))

    run_propagator(main)
    assert not caplog.records
