"""Reports of a result for people: an HTML page with plots, and a table for the terminal.

Their only input is a `Result` of `scenarios/result.py`.
"""

from delta_prop_simulations.report.page import html
from delta_prop_simulations.report.terminal import format_result

__all__ = ["format_result", "html"]
