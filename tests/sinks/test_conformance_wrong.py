"""The conformance kit finds every sink that breaks the contract, and names the broken rule."""

from __future__ import annotations

import math
from typing import Any, Literal

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop.testing.loop import Stuck
from delta_prop_sinks import CallbackSink, ContractViolation, check_sink
from delta_prop_sinks.conformance import RULES
from delta_prop_wire.delta import Delta, delete
from delta_prop_wire.errors import UsageError
from tests.sinks import wrong_blocking, wrong_forgetting, wrong_forwarded, wrong_rebuilds, wrong_sinks
from tests.sinks.correct_sinks import Forgetting, Plain, Prompt, Store, Target, Through
from tests.sinks.wrong_sinks import HangsInsideAShield, HangsWhenClosed

WRONG = (
    *wrong_sinks.WRONG,
    *wrong_rebuilds.WRONG,
    *wrong_forgetting.WRONG,
    *wrong_forwarded.WRONG,
    *wrong_blocking.WRONG,
)


def complaint_about(kind: type[Plain], backend: Literal["asyncio", "trio"] = "asyncio") -> str:
    """Return the kit's complaint about a sink, or empty text."""
    target = Target()

    def make() -> Plain:
        return kind(target) if issubclass(kind, (Prompt, Store)) else kind()

    async def main() -> None:
        await check_sink(make, failing=target.fail, pause_s=2.0)

    try:
        run_virtual(main, backend=backend)
    except ContractViolation as violation:
        return str(violation)
    return ""


def test_correct_sinks_conform(full: bool) -> None:
    for kind in (Prompt, Store, Forgetting, *((Plain, Through) if full else ())):
        assert not complaint_about(kind), kind


@pytest.mark.parametrize(("kind", "rule", "observation"), WRONG, ids=[kind.__name__ for kind, _, _ in WRONG])
def test_contract_violation_is_found(kind: type[Plain], rule: str, observation: str) -> None:
    complaint = complaint_about(kind)
    assert complaint.startswith(f"{rule}: ")
    assert observation in complaint
    assert complaint.endswith(f". The contract: {RULES[rule]}.")
    assert "\n" not in complaint


def test_every_rule_has_a_sink_that_breaks_it() -> None:
    assert {rule for _, rule, _ in WRONG} == set(RULES)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_shielded_hang_is_reported_in_virtual_time(backend: Any) -> None:
    with pytest.raises(Stuck, match=r"HangsInsideAShield\.aclose"):
        complaint_about(HangsInsideAShield, backend)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"make": 5}, "make 5 cannot be called: give a function that creates the sink, such as its class"),
        ({"make": None}, "make None cannot be called"),
        ({"probe": 5}, "probe 5 cannot be called: give a function, or None"),
        (
            {"probe": lambda sink: 7},
            r"probe: probe\(sink\) returned 7, not an awaitable: make it `async def`",
        ),
        (
            {"make": lambda: CallbackSink(print)},
            r"probe is missing, and a CallbackSink has no get\(\) to compare: give a probe",
        ),
        ({"expected": len}, "expected: without a probe there is nothing to compare it with"),
        ({"failing": True}, "failing True cannot be called: give a function, or None"),
        ({"deadline_s": -1}, "deadline_s -1 is not a number of seconds above 0"),
        ({"deadline_s": 0}, "deadline_s 0 is not a number of seconds above 0"),
        ({"deadline_s": math.nan}, "deadline_s nan is not a number of seconds above 0"),
        ({"deadline_s": math.inf}, "deadline_s inf is not a number of seconds above 0"),
        ({"deadline_s": "5"}, "deadline_s '5' is not a number of seconds above 0"),
        ({"pause_s": True}, "pause_s True is not a number of seconds above 0"),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    async def main() -> None:
        await check_sink(**{"make": Plain, **given})

    with pytest.raises(UsageError, match=f"^{message}"):
        run_virtual(main)


@pytest.mark.parametrize(
    ("object_type", "message"),
    [
        (None, r"open: make\(\) gave a NoneType, which has no open\(\)\."),
        (Delta, r"open: make\(\) gave a Delta, which has no open\(\)\."),
    ],
)
def test_object_that_is_not_a_sink_is_reported(object_type: Any, message: str) -> None:
    with pytest.raises(ContractViolation, match=message):
        run_virtual(check_sink, lambda: object_type and object_type("a", delete()))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_hanging_sink_is_reported_in_real_time(backend: Any) -> None:
    async def main() -> None:
        await check_sink(lambda: HangsWhenClosed(Target()), deadline_s=1.0)

    with pytest.raises(ContractViolation, match=r"aclose\(\) had not ended after 1 s"):
        anyio.run(main, backend=backend)


def test_duplicates_seen_by_probe_are_found() -> None:
    async def probe(sink: CallbackSink) -> object:
        return sink.statistics().calls

    with pytest.raises(
        ContractViolation, match="redelivery: after every delivery was redelivered, readers saw"
    ):
        run_virtual(check_sink, lambda: CallbackSink(lambda offset, delta: None), probe)


def test_probe_with_expected_content_finds_missing_row() -> None:
    applied_offsets: set[int] = set()

    def take(offset: int, delta: Delta) -> None:
        if offset != 5:
            applied_offsets.add(offset)

    async def probe(sink: CallbackSink) -> object:
        return sorted(applied_offsets)

    async def main() -> None:
        await check_sink(
            lambda: CallbackSink(take), probe, expected=lambda rows: [row.offset for row in rows]
        )

    with pytest.raises(
        ContractViolation, match=r"order: .* 13 entries instead of 14, first differing at 5: \[6, "
    ):
        run_virtual(main)
