"""The boundary of the core: what is done per row and per frame, and the choice of who does it.

A function whose work the native core can do asks `core_mode.core` first. `Core` itself takes nothing, so each
function goes its general way, in Python, which is complete by itself and defines the result. `native_core.py`
takes most work, with the same result. Importing `delta_prop` chooses it if it is installed, unless the
environment has `DELTA_PROP_CORE=python`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from delta_prop_core import PackedRows
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta, KnownIds, Source
    from delta_prop_wire.frame_runs import FrameRun, RunLimits
    from delta_prop_wire.stamp import LoggedRun, LogName, Stamp

VARIABLE = "DELTA_PROP_CORE"
BOUNDARY = 4
"""The version of the boundary; a native core of another version is not taken."""


class Core:
    """The boundary, and the twin: each method returns None, or False, for work left to the general way.

    No method has a clock, I/O or an await. The native core overrides all of them.
    """

    __slots__ = ()

    def parse_batch(self, body: bytes | memoryview) -> Batch | None:
        """Read a body and check all of it, as `body_checks.parse_batch` and `validate.validate_batch` do."""

    def batch_is_valid(self, batch: Batch) -> bool:
        """True if `validate.validate_batch` accepts a batch; if False, it may accept it nevertheless."""
        return False

    def pack_delta(self, delta: Delta) -> PackedRows | None:
        """Copy and check a delta that has only a name, numbers and bytes, as `validate_delta` does."""

    def pack_columns(
        self, keys: object, matrix: object, indices: object, namespace: object, kind: object
    ) -> PackedRows | None:
        """Copy and check rows of numbers as `encode.encode_vectors` takes them, with a list of keys."""

    def encode_rows(
        self, rows: Sequence[PackedRows], header: tuple[int, int, int, int, int], clock: bytes
    ) -> Batch | None:
        """Encode rows as `encode.encode_batch` does; None if they are too large, or have invalid counters.

        `header`: attributes, origin, epoch, base and hybrid time. `clock`: the column of its entries.
        """

    def pack_logged_head(
        self,
        batch: Batch,
        offset: int,
        *,
        lamport: int,
        source: Source,
        time: int,
        previous_crc: int,
        synced_offset: int,
        known_ids: KnownIds,
        log: LogName,
    ) -> tuple[bytes, int] | None:
        """Return what `stamp.pack_logged_head` returns."""

    def log_run(
        self,
        batches: list[Batch],
        offset: int,
        *,
        lamport: int,
        source: Source,
        time: int,
        previous_crc: int,
        synced_offset: int,
        index: tuple[int, int, int],
        log: LogName,
    ) -> LoggedRun | None:
        """Return what `stamp.log_run` returns. None also unless each body is of type bytes."""

    def unpack_logged_head(self, raw: Buffer) -> tuple[int, int, Stamp] | None:
        """Read sequence, payload length and stamp from the 64-byte head of an uncompressed frame in a log.

        None also for any other or invalid frame, whose error `unpack_header` or `unpack_stamp` raises.
        """

    def take_run(self, received: memoryview, limits: RunLimits) -> FrameRun | None:
        """Return the run at the start of received bytes, as `frame_runs.find_run` does."""

    def make_slots(self) -> Any:
        """Return the slots of a table of vectors, as `slots.py` of the sinks describes them."""

    def fold_rows(
        self,
        tables: Sequence[Any],
        raw: bytes | memoryview,
        place: tuple[int, int],
        rows: NDArray[np.intp] | None,
        adds: bool,
    ) -> tuple[int, int]:
        """Fold leading rows of a body; return how many were taken, and how many of these were folded.

        `tables`: for each of the body's namespaces, an object with its `slots`, or None. `place`: offset and
        Lamport number of the first row. `rows`: the rows to fold; None for all. `adds`: new vectors get
        slots; else rows that change a part of a vector without a slot are skipped.

        A row is not taken if it is rare, is not newer than its vector's head, or has no effect.
        """
        return 0, 0


class CoreMode:
    """The core of the process: `core`, for reading only, and `is_native`, which is False for the twin."""

    __slots__ = ("_find_native", "_name_at_use", "core", "is_native")
    core: Core
    is_native: bool

    def __init__(self) -> None:
        self._name_at_use: Callable[[], str] | None = None
        self._find_native: Callable[[], Callable[[], Core]] | None = None
        self.core = Core()
        self.is_native = False

    def install(self, find: Callable[[], Callable[[], Core]]) -> None:
        """Make the native core available.

        `find` returns what makes it; `find` raises ImportError if there is none in the right version.
        """
        self._find_native = find

    def choose(self, name: str) -> None:
        """Choose the core by its name. Raises UsageError."""
        if name not in ("native", "python"):
            raise UsageError(f"{VARIABLE}={name!r:.40}: give native or python")
        if name == "native":
            self._require_native()
            with suppress(AttributeError):
                del self.core
        else:
            self.core = Core()
        self.is_native, self._name_at_use = name == "native", None

    def choose_at_use(self, name: Callable[[], str]) -> None:
        """Choose the core whose name `name` returns, at the first use, which may raise UsageError.

        So an import never fails because of the environment.
        """
        self._name_at_use = name
        del self.core, self.is_native

    def _require_native(self) -> Callable[[], Core]:
        try:
            if self._find_native is None:
                raise ImportError("delta_prop is not imported")
            return self._find_native()
        except ImportError as error:
            raise UsageError(
                f"{VARIABLE}=native: there is no native core ({error}): install it, or give python"
            ) from None

    def __getattr__(self, name: str) -> Any:
        """Choose and make the core at its first use; the imports of the native one take long."""
        if name not in ("core", "is_native"):
            raise AttributeError(name)
        if self._name_at_use is not None:
            self.choose(self._name_at_use())
            return getattr(self, name)
        self.core = self._require_native()()
        return self.core

    @property
    def name(self) -> str:
        """The name of the core: `native` or `python`."""
        return "native" if self.is_native else "python"

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Use a core inside a `with`, in a test that compares both."""
        before = self.name
        self.choose(name)
        try:
            yield
        finally:
            self.choose(before)


core_mode = CoreMode()
