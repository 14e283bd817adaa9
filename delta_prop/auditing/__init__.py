"""Audits of sinks on one machine: what a sink holds against what the log makes of it, and the repair.

The public names. `delta_prop.spark` has the same for what outgrows one machine.
"""

from delta_prop.auditing.audit import audit
from delta_prop.auditing.contents import Lines
from delta_prop.auditing.differences import Difference
from delta_prop.auditing.repairing import Repaired, repair, repair_directory, repairs

__all__ = ["Difference", "Lines", "Repaired", "audit", "repair", "repair_directory", "repairs"]
