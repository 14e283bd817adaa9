"""Named faulty versions of the production code. The simulation must find each of them."""

from delta_prop_simulations.chaos.mutants.delivery import DELIVERY
from delta_prop_simulations.chaos.mutants.log import LOG
from delta_prop_simulations.chaos.mutants.mutant import Mutant, apply_mutant
from delta_prop_simulations.chaos.mutants.oracle import ORACLE
from delta_prop_simulations.chaos.mutants.pipeline import PIPELINE
from delta_prop_simulations.chaos.mutants.protocol import PROTOCOL
from delta_prop_simulations.chaos.mutants.recovery import RECOVERY

__all__ = ["MUTANTS", "Mutant", "apply_mutant"]

MUTANTS: dict[str, Mutant] = {
    one.name: one for one in (*LOG, *PIPELINE, *RECOVERY, *DELIVERY, *PROTOCOL, *ORACLE)
}
"""All mutants, by name. They are sorted by layer: log, pipeline, recovery, sinks, network, the simulation
itself.
"""
