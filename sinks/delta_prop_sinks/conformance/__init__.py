"""The conformance kit: checks that a sink follows the contract of `sink.py`, for our sinks and users' own.

It acts as the delivery loop: it delivers rows in order, in parts, repeatedly, from quarantine, and rows that
another service accepted; it cancels calls at every wait, makes threads fail or run slowly, closes and crashes
the sink; and it compares the readers' view with the reference fold. `check.py` has the public function,
`story.py`, `losses.py`, `rebuilding.py` and `forwarded.py` the scenarios, `player.py` the loop, `fakes.py`
the fakes, `rules.py` the rules.
"""

from delta_prop_sinks.conformance.check import check_sink
from delta_prop_sinks.conformance.fakes import Applied
from delta_prop_sinks.conformance.rules import RULES, ContractViolation

__all__ = ["RULES", "Applied", "ContractViolation", "check_sink"]
