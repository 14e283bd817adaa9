"""The boundary of the core: what is done per row and per frame, and the choice of who does it.

A function that has a faster way asks `core_mode.core` first. `Core` itself takes nothing, so each function
goes its general way, which is complete by itself. `delta_prop_wire.fast` takes most work in fewer steps, with
the same result. Importing `delta_prop` installs it, unless `DELTA_PROP_CORE=general`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.buffer import ReceiveBuffer
    from delta_prop_wire.credit_window import CreditWindow
    from delta_prop_wire.delta import AckLevel, Delta, KnownIds, Priority, Source
    from delta_prop_wire.frames import Ack
    from delta_prop_wire.stamp import Stamp

VARIABLE = "DELTA_PROP_CORE"


@dataclass(slots=True)
class FrameRun:
    """Batches of one origin and epoch, whose counters and sequences continue from one to the next.

    `sequence`: the sequence of the first row. `rows`, `size`: the number of deltas and of bytes in all
    frames, as charged to credit.
    """

    sequence: int
    ack_wanted: bool
    batches: list[Batch]
    rows: int
    size: int


class Core:
    """The general core. Each method returns None, or False, for work that it leaves to the general way.

    No method has a clock, I/O or an await. Another core overrides some methods.
    """

    __slots__ = ()

    def parse_batch(self, body: bytes | memoryview) -> Batch | None:
        """Read a body and check all of it, as `body_checks.parse_batch` does."""

    def batch_is_valid(self, batch: Batch) -> bool:
        """True if `validate.validate_batch` would accept a batch; if False, it may accept it nevertheless."""
        return False

    def is_opaque_only(self, delta: Delta) -> bool:
        """True if a delta is valid, and sets only the bytes of a fact, under names of printable ASCII."""
        return False

    def pack_keys(self, keys: Sequence[str], bytes_max: int) -> tuple[bytes, bytes] | None:
        """Return keys as bytes, end to end, and their ends as a column of u32, to pass to `encode_columns`.

        None also if a key is empty, longer than `bytes_max`, or not printable ASCII.
        """

    def encode_columns(
        self,
        header: tuple[int, ...],
        keys: Sequence[str],
        namespace: str,
        *,
        width: int,
        values: Sequence[Buffer],
        indices: Sequence[Buffer] | None,
        packed_keys: tuple[bytes, bytes] | None,
    ) -> Batch | None:
        """Encode rows of `width` numbers each, as `encode.encode_columns` does without clock and ids.

        `header`: the fields of the body's header from the attributes to the mask of kinds.
        """

    def encode_row(
        self,
        key: bytes,
        values: Buffer,
        indices: Buffer | None,
        *,
        width: int,
        namespace: str,
        kind: int,
        origin: int,
        base: int,
        ack_level: AckLevel,
        priority: Priority,
        hybrid_time: int,
    ) -> Batch | None:
        """Encode one row, whose key is printable ASCII, as `encode.encode_columns` does."""

    def encode_opaque(
        self,
        deltas: Sequence[Delta],
        *,
        origin: int,
        base: int,
        epoch: int,
        ack_level: AckLevel,
        priority: Priority,
    ) -> Batch | None:
        """Encode deltas that pass `is_opaque_only`, as `encode.encode_batch` does."""

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
    ) -> tuple[bytes, int] | None:
        """Return what `stamp.pack_logged_head` returns."""

    def unpack_logged_head(self, raw: Buffer) -> tuple[int, int, Stamp] | None:
        """Read sequence, payload length and stamp from the 64-byte head of an uncompressed frame in a log.

        None also for any other or invalid frame, whose error `unpack_header` or `unpack_stamp` raises.
        """

    def pack_ack(self, ack: Ack) -> bytes | None:
        """Return the payload of an Ack."""

    def unpack_ack(self, sequence: int, payload: Buffer) -> Ack | None:
        """Read the payload of an Ack."""

    def take_run(
        self, buffer: ReceiveBuffer, window: CreditWindow, payload_bytes_max: int, sequence_min: int
    ) -> FrameRun | None:
        """Take the frames of a run from a buffer, as long as they are complete and the window is open.

        `sequence_min`: the lowest sequence allowed for the first row, since the sequences of a connection
        rise.
        """


class CoreMode:
    """The core of the process: `core`, for reading only, and `is_fast`, which is False for the general one.

    Paths that are not in the core, since they touch a pipeline or a sink, ask `is_fast` before their first
    step.
    """

    __slots__ = ("_make_core", "core", "is_fast")
    core: Core

    def __init__(self) -> None:
        self._make_core: dict[str, Callable[[], Core]] = {"general": Core}
        self.choose("general")

    def install(self, make: Callable[[], Core]) -> None:
        """Make a core available under the name `fast`; `make` returns it."""
        self._make_core["fast"] = make

    def choose(self, name: str) -> None:
        """Choose the core by its name; it is made at its first use. Raises UsageError."""
        if name not in self._make_core:
            raise UsageError(f"{VARIABLE}={name!r:.40}: give {' or '.join(sorted(self._make_core))}")
        self.is_fast = name == "fast"
        with suppress(AttributeError):
            del self.core

    def __getattr__(self, name: str) -> Core:
        """Make the core at its first use, since its import may take long."""
        if name != "core":
            raise AttributeError(name)
        self.core = self._make_core["fast" if self.is_fast else "general"]()
        return self.core

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Use a core inside a `with`, in a test that compares both."""
        before = "fast" if self.is_fast else "general"
        self.choose(name)
        try:
            yield
        finally:
            self.choose(before)


core_mode = CoreMode()
