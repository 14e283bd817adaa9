"""Scenario files: parsing, alternatives, and mistakes refused with their key and fix."""

from __future__ import annotations

import pytest

from delta_prop_simulations.scenarios.reading import parse_duration, read_setups
from delta_prop_simulations.scenarios.scenario import Between, Event
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError
from tests.simulations.scenarios.small_scenarios import TWO_SINKS, setup


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("90s", 90.0), ("1.5m", 90.0), ("1h", 3600.0), (3, 3.0), ("7", 7.0)]
)
def test_durations_have_units(text: object, seconds: float) -> None:
    assert parse_duration(text, "duration") == pytest.approx(seconds)


def test_scenario_is_read_with_its_defaults() -> None:
    text = TWO_SINKS.replace("batch = 20", "batch = {min = 1, max = 9}").replace(
        "noise = 0.3", 'faults = [{from = "1s", for = "500ms", what = "fails"}]'
    )
    scenario = setup(text).scenario
    assert scenario.duration == 3.0
    assert scenario.source[0].batch == Between(1, 9)
    assert scenario.sink[1].faults == (Event(1.0, 0.5, "fails"),)
    assert scenario.service.log is None


def test_alternative_changes_only_named_keys() -> None:
    text = TWO_SINKS + (
        '[[alternative]]\nname = "other"\nset = {"sink.slow.per_call_ms" = 9, "service.rate_law" = '
        '"depth", "source.web.deltas.keys" = 7, "duration" = "9s"}\n'
        '[[alternative]]\nname = "without"\nwithout = ["sink.slow"]\n'
    )
    base, other, without = (each_setup.scenario for each_setup in read_setups(text))
    assert (base.sink[1].per_call_ms, other.sink[1].per_call_ms) == (5.0, 9.0)
    assert other.service.settings.rate_law == "depth"
    assert other.source[0].deltas.keys == 7
    assert other.duration == 9.0
    assert other.sink[0] == base.sink[0]
    assert [sink.name for sink in without.sink] == ["quick"]
    assert [each_setup.scenario.duration for each_setup in read_setups(text, duration=2.0)] == [2.0, 2.0, 2.0]


MISTAKES = {
    ("rate = 1000", "rats = 1000"): r"source\[0\].rats: unknown key: did you mean rate?",
    ("rate = 1000", "rate = 0"): r"source\[0\].rate = 0.*give 0.001 to",
    ("rate = 1000", 'rate = "fast"'): r"source\[0\].rate: \"fast\" is not a number",
    ("batch = 20", "batch = 20\ndeltas = {mix = {dense = 0}}"): r"^source\[0\].deltas.mix: every share is 0",
    ("batch = 20", "batch = 2000"): r"source\[0\].batch = 2000: give 1 to 1000",
    ('duration = "3s"', 'duration = "5 days"'): "duration: .* is not a duration: give seconds",
    ('duration = "3s"', "durations = 5"): "durations: unknown key: did you mean duration?",
    (
        "noise = 0.3",
        'distribution = "gamma"',
    ): r"sink\[1\].distribution: \"gamma\": give one of constant, normal",
    ("noise = 0.3", 'distribution = "calibrated"'): r"sink\[1\].file: .* give both, or neither",
    ("noise = 0.3", 'faults = [{from = 1, what = "fails"}]'): r"sink\[1\].faults\[0\].for: missing",
    (
        "noise = 0.3",
        'faults = [{from = 1, for = 1, what = "fail"}]',
    ): r"what: \"fail\": give one of fails",
    ("noise = 0.3", "faults = [{froms = 1}]"): r"faults\[0\].froms: unknown key: did you mean from",
    ("noise = 0.3", 'topics = ["x"]'): "topic 'x' is unknown",
    ('name = "slow"', 'name = "quick"'): "sink name 'quick': used twice",
    ("noise = 0.3", "[service]\nqueue_deltas = 5"): "service.queue_deltas: .* did you mean queue_deltas_max",
    ("noise = 0.3", "[service]\nlog = 5"): 'service.log: 5: give "memory"',
    (
        "noise = 0.3",
        '[[alternative]]\nname="x"\nset={"sink.slwo.noise"=1}',
    ): "'slwo' does not exist: did you mean slow",
    ("noise = 0.3", '[[alternative]]\nname="x"\nset={"sink.slow.nose"=1}'): "alternative.*did you mean noise",
    ("noise = 0.3", '[[alternative]]\nname="x"\nwithout=["sink.x"]'): "'sink.x' does not exist.*quick, slow",
    ("[[source]]", "[[["): "not valid TOML",
    (
        "noise = 0.3",
        '[[alternative]]\nname="x"\nwithout=["sink.slow", "sink.quick"]',
    ): r"alternative\[0\].without: without 'sink.quick' no sink is left: keep at least one",
    (
        "[[sink]]",
        '[[alternative]]\nname="x"\nwithout=["source.web"]\n[[sink]]',
    ): r"alternative\[0\].without: without 'source.web' no source is left",
    ("batch = 20", 'start = "3s"'): r"source\[0\].start = 3.0: .* below duration, which is 3.0",
    (
        "noise = 0.3",
        'faults = [{from = 4, for = 1, what = "fails"}]',
    ): r"sink\[1\].faults\[0\].from = 4.0: .* below duration",
    ("noise = 0.3", '[[alternative]]\nname="x"\nset={"source.web.start"="3s"}'): r"\[0\]: source\[0\].start",
    (
        "noise = 0.3",
        '[[machine]]\nname="a"\n[[fault]]\nmachine="a"\nwhat="kill"\nfrom=9',
    ): r"fault\[0\].from = 9.0",
    (
        "batch = 20",
        'ack_level = "durable"',
    ): r"source\[0\].ack_level = durable: a log in memory.*\[service.log\]",
    (
        "noise = 0.3",
        '[[alternative]]\nname="x"\nset={"source.web.ack_level"="logged"}',
    ): r"alternative\[0\]: source\[0\].ack_level = logged",
}


def test_shorter_duration_permits_source_starting_later() -> None:
    text = TWO_SINKS.replace("batch = 20", 'start = "2s"')
    assert setup(text, duration=1.0).scenario.source[0].start == 2.0


def test_log_on_disk_permits_durable_acks() -> None:
    text = TWO_SINKS.replace("batch = 20", 'ack_level = "durable"') + "[service.log]\n"
    assert setup(text).scenario.source[0].ack_level is AckLevel.DURABLE


@pytest.mark.parametrize(("change", "message"), MISTAKES.items(), ids=lambda value: str(value)[:40])
def test_mistake_is_refused_with_its_key_and_fix(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_setups(TWO_SINKS.replace(*change))
