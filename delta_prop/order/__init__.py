"""Causal order: decides which deltas to append now, which to hold as pending, and which to refuse. Pure."""

from delta_prop.order.clock import OriginClocks
from delta_prop.order.orderer import Entry, Orderer, OrdererStatistics, RefusedEntry, Verdict

__all__ = ["Entry", "Orderer", "OrdererStatistics", "OriginClocks", "RefusedEntry", "Verdict"]
