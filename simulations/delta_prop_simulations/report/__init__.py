"""What a result looks like to people: a page of HTML with plots, a table for the terminal.

Reads `laboratory/result.py` and nothing else.
"""

from delta_prop_simulations.report.page import html
from delta_prop_simulations.report.terminal import table

__all__ = ["html", "table"]
