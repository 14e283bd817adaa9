"""Makes the table of heads of a partition: the native one, or its twin."""

from __future__ import annotations

from delta_prop.partition.ingest.vector_heads import HEADS_MAX, VectorHeads
from delta_prop_wire.core import core_mode


def make_vector_heads(*, heads_max: int = HEADS_MAX) -> VectorHeads:
    """Return an empty table, of the core that runs."""
    if not core_mode.is_native:
        return VectorHeads(heads_max=heads_max)
    from delta_prop.partition.core.native_heads import NativeVectorHeads

    return NativeVectorHeads(heads_max=heads_max)
