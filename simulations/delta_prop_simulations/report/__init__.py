"""Reports of a result (`scenarios/result.py`): an HTML page with plots, and a table for the terminal."""

from delta_prop_simulations.report.numbers import format_result
from delta_prop_simulations.report.page import html

__all__ = ["format_result", "html"]
