"""Named wrong versions of our own code: each must be found, or the simulation looks the wrong way."""

from delta_prop_simulations.disasters.mutants.chain import CHAIN
from delta_prop_simulations.disasters.mutants.delivery import DELIVERY
from delta_prop_simulations.disasters.mutants.judging import JUDGING
from delta_prop_simulations.disasters.mutants.log import LOG
from delta_prop_simulations.disasters.mutants.mutant import Mutant, applied
from delta_prop_simulations.disasters.mutants.protocol import PROTOCOL
from delta_prop_simulations.disasters.mutants.recovery import RECOVERY

__all__ = ["MUTANTS", "Mutant", "applied"]

MUTANTS: dict[str, Mutant] = {
    one.name: one for one in (*LOG, *CHAIN, *RECOVERY, *DELIVERY, *PROTOCOL, *JUDGING)
}
"""By name, in the order of a delta's way: log, chain, sinks, network; last the simulation's own."""
