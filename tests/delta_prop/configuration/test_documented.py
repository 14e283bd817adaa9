"""The page on operating names every key of a configuration, and its example is one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from delta_prop.configuration import Configuration, make_sinks, read_configuration
from delta_prop.configuration.shape import Access, Logging, TlsFiles
from delta_prop.configuration.sinks import KINDS
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.retention import LogSettings

DOCS = Path(__file__).parents[3] / "docs"
OPERATING = (DOCS / "operating.md").read_text()


def test_every_key_is_described() -> None:
    described = OPERATING + (DOCS / "architecture.md").read_text()
    for section in (Configuration, ServerSettings, LogSettings, TlsFiles, Access, Logging, *KINDS.values()):
        names = [one.name for one in dataclasses.fields(section)]
        page = described if section is LogSettings else OPERATING
        assert [name for name in names if f"`{name}`" not in page and f"[{name}]" not in page] == []
    assert [kind for kind in KINDS if f"`{kind}`" not in OPERATING] == []


def test_the_example_is_a_configuration() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", OPERATING, re.DOTALL)
    read = read_configuration(example)
    assert [one.sink.name for one in make_sinks(read.sinks)] == ["storage", "index", "audit"]
    assert read.server.heartbeat_s == 3
