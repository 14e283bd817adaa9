"""The tables of resident vectors: one for each namespace, their size, and the staged ones of a rebuild.

Bookkeeping only: `resident.py` decides which rows are folded, and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_sinks.eviction import oldest_first
from delta_prop_sinks.sink import TryAgain
from delta_prop_sinks.storage_image import add_block
from delta_prop_sinks.vector_table import SLOT_BYTES, VectorTable, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delta_prop_sinks.delta_chain import ChainBase, DeltaChains
    from delta_prop_sinks.storage_image import Block
    from delta_prop_wire.state_rows import StateRow


class ResidentTables:
    """The present tables, their bytes, and the bound of these.

    `by_namespace`: the present tables; `staged`: the new ones of a rebuild, until they are swapped in.
    `touched`: an ordered set of tables that may have dirty rows. `version`: changes when the vectors become
    invalid, which aborts a running `apply`. `spare_bytes`: bytes that more buffered rows may take;
    `row_bytes`: bytes per row, in the table of the rows buffered last.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.by_namespace: dict[str, VectorTable] = {}
        self.staged: dict[str, VectorTable] | None = None
        self.touched: dict[VectorTable, None] = {}
        self.version = 0
        self.spare_bytes = 0
        self.row_bytes = 0
        self._size = 0
        self._unsized: set[VectorTable] = set()  # tables whose size may differ from `counted_size`
        self._dimension_of: Callable[[str], int | None] = lambda _: None

    def follow_dimensions(self, dimension_of: Callable[[str], int | None]) -> None:
        """Give new tables the dimension that the log has fixed for their namespaces."""
        self._dimension_of = dimension_of

    # --- sizes

    @property
    def size(self) -> int:
        """Bytes of the rows, or of the staged rows while there are any."""
        if self.staged is not None:
            return sum(table.size for table in self.staged.values())
        for table in self._unsized:  # only the tables touched since, because there may be many tables
            size = table.size
            self._size += size - table.counted_size
            table.counted_size = size
        self._unsized.clear()
        return self._size

    def measure_spare(self) -> None:
        """Measure how many bytes more rows may take."""
        self.spare_bytes = self.bytes_max - self.size

    def reserve(self, table: VectorTable, count: int) -> bool:
        """Make `row_bytes` that of a table; True if `count` buffered rows fit into it."""
        assert table.dimension is not None
        self.row_bytes = SLOT_BYTES + 4 * table.dimension
        return self.spare_bytes >= count * self.row_bytes

    # --- tables

    def table(self, namespace: str) -> VectorTable:
        """Return the table of a namespace, to be changed; create it if there is none."""
        if (staged := self.staged) is not None:
            return staged.get(namespace) or staged.setdefault(namespace, self._new_table(namespace))
        table = self.by_namespace.get(namespace)
        if table is None:
            table = self.by_namespace[namespace] = self._new_table(namespace)
        self._unsized.add(table)
        self.touched[table] = None
        return table

    def _new_table(self, namespace: str) -> VectorTable:
        """Return a new table, with the dimension of the namespace if that is fixed."""
        table = VectorTable(namespace)
        dimension = self._dimension_of(namespace)
        if dimension is not None:
            table.fix_dimension(dimension)
        return table

    def take_touched(self) -> dict[VectorTable, None]:
        """Return the tables that may have become dirty since the last call."""
        touched, self.touched = self.touched, {}
        return touched

    def replace(self, tables: dict[str, VectorTable]) -> None:
        """Replace all tables, atomically."""
        self.by_namespace, self.touched = tables, {}
        self.version += 1
        self._size, self._unsized = 0, set(tables.values())
        for table in tables.values():
            table.counted_size = 0

    def adopt(self, tables: Iterable[VectorTable]) -> None:
        """Adopt complete tables, while there are none."""
        assert not self.by_namespace
        for table in tables:
            self.by_namespace[table.namespace] = table
            self._unsized.add(table)

    # --- rows

    def load_states(self, rows: Iterable[StateRow]) -> None:
        """Set vectors to these states unconditionally."""
        for row in rows:
            put(self.table(row.namespace), row.vector_id, row.state, row.offset)

    def load_block(self, block: Block) -> None:
        """Load many rows; rows that are resident already stay."""
        add_block(self.table(block.namespace), block)

    def load(self, namespace: str, vector_id: str, stored: ChainBase, offset: int) -> bool:
        """Load a row; False if it is resident already, since that one is newer."""
        table = self.table(namespace)
        if vector_id in table.slots:
            return False
        put(table, vector_id, stored, offset)
        return True

    def evict(self, chains: DeltaChains) -> int:
        """Evict clean rows, least recently used first, down to 7/8 of the bound; return their number."""
        excess = self.size - self.bytes_max // 8 * 7
        evicted = 0
        for table, vector_id in oldest_first(self.by_namespace.values()):
            if excess <= 0:
                break
            before = table.size
            chains.forget((table.namespace, vector_id))
            table.release(table.slots[vector_id])
            self._unsized.add(table)
            excess -= before - table.size
            evicted += 1
        return evicted


class UnchangedTables:
    """A check that the vectors have stayed valid since it was made."""

    def __init__(self, tables: ResidentTables) -> None:
        self._tables = tables
        self._version = tables.version

    def check(self) -> None:
        """Raise TryAgain if the vectors have become invalid meanwhile."""
        if self._tables.version != self._version:
            raise TryAgain("the vectors were rebuilt while deltas were folded: all rows are redelivered")
