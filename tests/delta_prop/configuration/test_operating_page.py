"""docs/operating.md names every key of a configuration with its default; its example is valid."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

from delta_prop.configuration import Configuration, make_sinks, read_configuration
from delta_prop.configuration.schema import Access, Logging, TlsFiles
from delta_prop.configuration.sinks import KINDS
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks.hnsw_builder import Hnsw

SECTIONS = (Configuration, ServerSettings, LogSettings, TlsFiles, Access, Logging, Hnsw, *KINDS.values())
DOCS = Path(__file__).parents[3] / "docs"
OPERATING = (DOCS / "operating.md").read_text()


def test_every_key_is_documented() -> None:
    both_pages = OPERATING + (DOCS / "architecture.md").read_text()
    for section in SECTIONS:
        names = [field.name for field in dataclasses.fields(section)]
        page = both_pages if section is LogSettings else OPERATING
        assert [name for name in names if f"`{name}`" not in page and f"[{name}]" not in page] == []
    assert [kind for kind in KINDS if f"`{kind}`" not in OPERATING] == []


def _parse_default(text: str) -> object:
    """Parse a default of the page, such as `16 MiB`, `5 s`, `1,000 per second` or `no`; None for words."""
    if text in ("yes", "no"):
        return text == "yes"
    match = re.fullmatch(r"([\d,.]+)(?: (KiB|MiB|GiB))?(?: s| per second)?", text)
    if match is None or text.count(".") > 1:
        return text.strip("`") if re.fullmatch(r"`\w+`", text) else None
    return float(match[1].replace(",", "")) * {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]]


def test_documented_defaults_match_the_code() -> None:
    defaults: dict[str, set[object]] = {}
    for section in (ServerSettings, Hnsw, *KINDS.values()):
        for field in dataclasses.fields(section):
            defaults.setdefault(field.name, set()).add(field.default)
    checked = set()
    for line in OPERATING.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        for cell, next_cell in itertools.pairwise(cells):
            names = re.findall(r"`(\w+)`", cell)
            documented = [_parse_default(text) for text in next_cell.split("; ")]
            if len(names) == len(documented) and set(names) <= defaults.keys():
                for name, value in zip(names, documented, strict=True):
                    assert value is None or value in defaults[name], (name, value, defaults[name])
                    checked.add(name)
    assert len(checked) > 40


def test_documented_example_is_a_valid_configuration() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", OPERATING, re.DOTALL)
    configuration = read_configuration(example)
    assert [attachment.sink.name for attachment in make_sinks(configuration.sinks)] == [
        "storage",
        "index",
        "audit",
    ]
    assert configuration.server.heartbeat_interval_s == 3
