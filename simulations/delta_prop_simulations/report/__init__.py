"""Reports of a result for people: a page of HTML with plots, a table for the terminal.

Reads `scenarios/result.py` only.
"""

from delta_prop_simulations.report.page import html
from delta_prop_simulations.report.terminal import table

__all__ = ["html", "table"]
