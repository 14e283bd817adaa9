"""Causal order: what may be appended now, what waits for its causes, what is refused. Pure."""

from delta_prop.order.clock import OriginClocks
from delta_prop.order.orderer import Entry, Orderer, OrdererStatistics, Refusal, Verdict

__all__ = ["Entry", "Orderer", "OrdererStatistics", "OriginClocks", "Refusal", "Verdict"]
