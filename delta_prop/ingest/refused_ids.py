"""Ids of deltas that were refused for good, so that no delta waits for one of them as a parent.

Pure and bounded: the newest are stored. An id is forgotten when a delta with it is accepted after all.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.spec import DELTA_ID_BYTES, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

IDS_MAX = 100_000
_U16 = np.dtype("<u2")


class RefusedIds:
    """The ids, each with the code of its refusal."""

    def __init__(self) -> None:
        self._codes: dict[bytes, int] = {}  # the newest last

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, ids: Iterable[bytes], code: int) -> None:
        """Note deltas that were refused for good."""
        codes = self._codes
        for one in ids:
            codes.pop(one, None)
            codes[one] = code
        for one in list(islice(codes, max(len(codes) - IDS_MAX, 0))):
            del codes[one]

    def discard(self, ids: Iterable[bytes]) -> None:
        """Forget the ids of accepted deltas."""
        if self._codes:
            for one in ids:
                self._codes.pop(one, None)

    def code(self, one: bytes) -> ErrorCode | None:
        """Return the code of the refusal of a delta with this id; None if none is known."""
        code = self._codes.get(one)
        return None if code is None else ErrorCode(code)

    def save(self) -> tuple[bytes, bytes]:
        """Return ids and codes, for `restore`."""
        return b"".join(self._codes), np.fromiter(self._codes.values(), _U16, len(self._codes)).tobytes()

    def restore(self, saved: tuple[bytes, bytes]) -> None:
        """Replace all with what `save` returned."""
        ids, codes = saved
        names = [ids[at : at + DELTA_ID_BYTES] for at in range(0, len(ids), DELTA_ID_BYTES)]
        self._codes = dict(zip(names, np.frombuffer(codes, _U16).tolist(), strict=True))

    def merge_older(self, older: RefusedIds) -> None:
        """Add the ids of another table, as older ones."""
        known = self._codes
        self._codes = {**older._codes, **known}
        self.add((), 0)
