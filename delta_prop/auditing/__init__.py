"""Audits and repairs of sinks on one machine: compares a sink's rows with the fold of the log.

Exports the public names. `delta_prop.spark` audits data that do not fit on one machine.
"""

from delta_prop.auditing.audit import audit
from delta_prop.auditing.contents import Lines
from delta_prop.auditing.differences import Difference
from delta_prop.auditing.repairing import RepairResult, repair, repair_directory, repairs

__all__ = ["Difference", "Lines", "RepairResult", "audit", "repair", "repair_directory", "repairs"]
