"""The conformance kit: does a sink keep the contract of `sink.py`? For our sinks and for users' own.

It plays the delivery loop: in order, in pieces, again, late, cancelled at every wait, with failing threads,
slowly, across closings and crashes, with rows that another service accepted; and compares what readers see
with the arithmetic's own fold. `check.py` is the call, `story.py`, `losses.py`, `rebuilding.py` and
`forwarded.py` what happens, `player.py` the loop, `world.py` the false world, `rules.py` what it says.
"""

from delta_prop_sinks.conformance.check import check_sink
from delta_prop_sinks.conformance.rules import RULES, NotConforming
from delta_prop_sinks.conformance.world import Applied

__all__ = ["RULES", "Applied", "NotConforming", "check_sink"]
