"""A plot alone is a valid SVG document, with its title and the names of its lines."""

from __future__ import annotations

from xml.etree import ElementTree

from delta_prop_simulations.report.axis import linear_axis
from delta_prop_simulations.report.plot import Line, Plot, picture
from tests.simulations.report.results import NASTY


def test_picture_names_its_lines() -> None:
    lines = tuple(Line(f"{NASTY} {number}", number, [0.0, 1.0], [0.0, 1.0]) for number in range(3))
    root = ElementTree.fromstring(
        picture(Plot("lag & more", linear_axis(1.0, "s"), linear_axis(1.0, "s"), lines))
    )
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == "lag & more, s"
    assert {line.name for line in lines} <= set(texts)
    box = [int(number) for number in root.attrib["viewBox"].split()]
    assert box[3] > box[2] / 2
