"""The page of a result: complete, valid HTML, escaped, self-contained, deterministic."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from delta_prop_simulations.report import html
from tests.simulations.report.results import NASTY, result

UNCLOSED_TAGS = {"meta", "path", "br"}


class Page(HTMLParser):
    """A parsed page: checks that every opened tag is closed, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in UNCLOSED_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def parse(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page


@pytest.mark.parametrize("alternative_count", [1, 2, 8])
@pytest.mark.parametrize("sink_count", [0, 1, 5])
def test_page_shows_every_name_and_verdict_escaped(alternative_count: int, sink_count: int) -> None:
    sample = result(alternative_count, sink_count)
    page = parse(html(sample, "delta-prop simulate x --seed 7"))
    for alternative in sample.alternatives:
        assert alternative.name in page.text
        for sink in alternative.sinks:
            assert sink.name in page.text
        for verdict in alternative.verdicts:
            assert verdict.what in page.text
    assert "delta-prop simulate x --seed 7" in page.text
    assert ("BROKEN" in page.text) == (alternative_count > 1)
    assert "b" not in page.tags
    assert NASTY in page.text
    assert "svg" in page.tags


def test_page_is_self_contained_and_deterministic() -> None:
    text = html(result())
    page = parse(text)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href")]
    assert "url(" not in text
    assert text == html(result())
    assert "nan" not in text.lower().replace(NASTY, "")


def test_page_of_long_run_has_bounded_size() -> None:
    sample = result(8, 5)
    for alternative in sample.alternatives:
        of_sinks = [series for sink in alternative.sinks for series in sink.series]
        for series in [*alternative.series, *of_sinks]:
            series.times_s[:] = [point / 100 for point in range(6_000)]
            series.values[:] = [float(point * 7919 % 1000) for point in range(6_000)]
    assert len(html(sample).encode()) < 1 << 20
