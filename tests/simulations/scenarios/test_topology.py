"""Machines, links and faults of a scenario: parsing, and mistakes refused with their key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from delta_prop_simulations.files import read_shipped
from delta_prop_simulations.scenarios.reading import read_setups
from delta_prop_simulations.scenarios.scenario import (
    Cut,
    CutDirection,
    FaultKind,
    FaultSpec,
    LinkSpec,
    MachineSpec,
    ReaderSpec,
    Stall,
)
from delta_prop_wire.errors import UsageError

TWO_MACHINES = """
name = "two"
duration = "6s"
[service]
log = {}
[[machine]]
name = "east"
clock_ahead = "-4s"
[[machine]]
name = "west"
[[link]]
name = "ocean"
between = ["east", "west"]
latency_ms = 30
cut = [{from = "1s", for = "2s", direction = "there"}]
[[source]]
name = "shop"
machine = "west"
rate = 100
batch = 10
deltas = {keys = 50}
[[sink]]
name = "index"
[[fault]]
from = "500ms"
for = "1s"
what = "kill"
machine = "east"
"""


def test_machines_links_and_faults_are_read() -> None:
    (setup,) = read_setups(TWO_MACHINES)
    scenario = setup.scenario
    assert scenario.machine == (MachineSpec("east", clock_ahead=-4.0), MachineSpec("west"))
    assert scenario.link == (
        LinkSpec(("east", "west"), name="ocean", latency_ms=30.0, cut=(Cut(1.0, 2.0, "there"),)),
    )
    assert scenario.fault == (FaultSpec(0.5, "kill", "east"),)
    assert [source.machine for source in scenario.source] == ["west"]


def test_reader_spec_is_read() -> None:
    table = '[[reader]]\nname = "late"\nmachine = "east"\nfrom = "1s"\nstall = [{from = "2s", for = 3}]'
    (setup,) = read_setups(f"{TWO_MACHINES}\n{table}")
    assert setup.scenario.reader == (ReaderSpec("late", "east", begin=1.0, stall=(Stall(2.0, 3.0),)),)
    without_machines = (
        TWO_MACHINES[: TWO_MACHINES.index("[[machine]]")]
        + TWO_MACHINES[TWO_MACHINES.index("[[source]]") : TWO_MACHINES.index("[[fault]]")]
    )
    with pytest.raises(UsageError, match=r"reader: there is no machine"):
        read_setups(without_machines.replace('machine = "west"\n', "") + '[[reader]]\nname = "late"')


def test_alternative_changes_link_by_name() -> None:
    changes = 'set = {"link.ocean.cut" = [], "link.ocean.latency_ms" = 99}'
    _, other = read_setups(f'{TWO_MACHINES}\n[[alternative]]\nname = "b"\n{changes}')
    assert other.scenario.link == (LinkSpec(("east", "west"), name="ocean", latency_ms=99.0),)
    _, other = read_setups(f'{TWO_MACHINES}\n[[alternative]]\nname = "b"\nwithout = ["link.ocean"]')
    assert other.scenario.link == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'machine = "west"',
            'machine = "wets"',
            "shop: machine = 'wets': unknown host: give one of east, west",
        ),
        ('between = ["east", "west"]', 'between = ["east"]', "link[0].between = ['east']: give two hosts"),
        (
            'between = ["east", "west"]',
            'between = ["east", "mars"]',
            "'mars': unknown host: give one of east, west, shop",
        ),
        ('direction = "there"', 'direction = "thither"', "link[0].cut[0].direction"),
        ('what = "kill"', 'what = "slay"', "fault[0].what"),
        ('what = "kill"', 'what = "clock_jumps"', "by: the jump of a clock"),
        ('what = "kill"', 'what = "kill"\nat = 3', "fault[0].at: unknown key"),
        ('from = "500ms"', "", "fault[0].from: missing"),
        ('name = "east"', 'name = "e.ast"', "give 1 to 40 letters, digits"),
        ('name = "east"', 'name = "west"', "machine name 'west': used by two hosts"),
        ("latency_ms = 30", "latency_ms = 0", "latency_ms = 0"),
    ],
)
def test_mistake_is_refused_with_its_key(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_setups(TWO_MACHINES.replace(old, new, 1))
    assert message in str(caught.value)


def test_machine_keys_without_machines_are_refused() -> None:
    without_machines = (
        TWO_MACHINES[: TWO_MACHINES.index("[[machine]]")] + TWO_MACHINES[TWO_MACHINES.index("[[source]]") :]
    )
    with pytest.raises(UsageError, match=r"shop: machine = 'west': unknown machine"):
        read_setups(without_machines)
    with pytest.raises(UsageError, match=r"fault: there is no machine"):
        read_setups(without_machines.replace('machine = "west"\n', ""))


TABLES = (("machine", MachineSpec), ("link", LinkSpec), ("fault", FaultSpec), ("reader", ReaderSpec))


def test_page_describes_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    key_of_field = {"begin": "from", "lasts": "for"}
    for table, kind in TABLES:
        for field in fields(kind):
            assert f"`{table}.{key_of_field.get(field.name, field.name)}`" in page
    assert all(f"`{what}`" in page for what in (*get_args(FaultKind), *get_args(CutDirection)))
    assert "`source.machine`" in page
    assert "`sink.machine`" in page


def test_scenario_of_the_page_is_readable() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```toml")[1:]]
    (text,) = (block for block in blocks if "[[machine]]" in block)
    (setup,) = read_setups(f'name = "page"\n{text}')
    assert [fault.what for fault in setup.scenario.fault] == ["power_cut"]


@pytest.mark.parametrize("name", ["geo_distributed", "link_cut", "crash_in_the_middle", "late_reader"])
def test_shipped_scenarios_are_read(name: str) -> None:
    base, *others = read_setups(read_shipped()[name])
    assert base.scenario.machine
    assert others
