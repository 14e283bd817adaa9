"""Ids of deltas that were refused for good, so that no delta waits for such a delta as its parent.

Pure and bounded: only the newest ids are stored. An id is forgotten if a delta with it is accepted later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from delta_prop_wire.spec import DELTA_ID_BYTES, ErrorCode

IDS_MAX = 100_000
_U16 = np.dtype("<u2")


class RefusedIds:
    """The ids, each with the code of its refusal."""

    def __init__(self) -> None:
        self._codes: dict[bytes, int] = {}  # the newest last

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, ids: Iterable[bytes], code: int) -> None:
        """Note the ids of deltas that were refused for good with this code."""
        codes = self._codes
        for delta_id in ids:
            codes.pop(delta_id, None)
            codes[delta_id] = code
        for delta_id in list(islice(codes, max(len(codes) - IDS_MAX, 0))):
            del codes[delta_id]

    def discard(self, ids: Iterable[bytes]) -> None:
        """Forget the ids of accepted deltas."""
        if self._codes:
            for delta_id in ids:
                self._codes.pop(delta_id, None)

    def code(self, delta_id: bytes) -> ErrorCode | None:
        """Return the code of the refusal of a delta with this id; None if none is known."""
        code = self._codes.get(delta_id)
        return None if code is None else ErrorCode(code)

    def save(self) -> tuple[bytes, bytes]:
        """Return ids and codes, for `restore`."""
        return b"".join(self._codes), np.fromiter(self._codes.values(), _U16, len(self._codes)).tobytes()

    def restore(self, saved: tuple[bytes, bytes]) -> None:
        """Replace the contents by what `save` returned."""
        ids, codes = saved
        restored_ids = [ids[start : start + DELTA_ID_BYTES] for start in range(0, len(ids), DELTA_ID_BYTES)]
        self._codes = dict(zip(restored_ids, np.frombuffer(codes, _U16).tolist(), strict=True))

    def merge_older(self, older: RefusedIds) -> None:
        """Add the ids of another table, as if they had been added before those of this one."""
        newer = self._codes
        self._codes = {**older._codes, **newer}
        self.add((), 0)  # drops the oldest beyond the bound
