"""What a sink holds that has no file of ours, as rows of one: states of a sink here, or JSON lines."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.auditing.stored import FORMS, signed
from delta_prop.checks import path_of
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import PurePath

    from delta_prop.auditing.stored import Row

NOWHERE = -1
"""The offset of a row that tells none."""


def rows_of_states(states: Iterable[tuple[str, str, State]]) -> Iterator[Row]:
    """States as a sink of this process gives them: namespace, vector id, state. Raises UsageError."""
    for row in states:
        if not isinstance(row, tuple) or len(row) != 3 or not all(map(isinstance, row, (str, str, State))):
            raise UsageError(
                f"sink: {row!r:.60} is no row: give (namespace, vector_id, State) for each vector"
            )
        namespace, vector_id, state = row
        value: bytes | None = None
        if state.vector is not None:
            kind, value = Kind.CREATE, state.vector.astype("<f4", copy=False).tobytes()
        elif state.alive:
            kind, value = Kind.OPAQUE, state.data or b""
        else:
            kind = Kind.DELETE
        metadata = json.dumps(dict(state.metadata)) if state.metadata else None
        key = map(signed, (0, 0, 0) if state.key is None else state.key)
        yield (namespace, vector_id, FORMS[kind], value, metadata, state.ignored, *key, NOWHERE)


class Lines:
    """A table in JSON lines, with the columns of a replay. `tell_metadata`: True if a line tells some."""

    def __init__(self, path: str | PurePath) -> None:
        self.path = path_of("path", path)
        self.tell_metadata = False

    def rows(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Row]:
        """The row on each numbered line. Raises UsageError, with the line's number."""
        for number, line in lines:
            if not line.strip():
                continue
            try:
                told = json.loads(line)
                if not isinstance(told, dict):
                    raise ValueError("no JSON object")
                yield self._row(told)
            except (ValueError, TypeError, OverflowError, binascii.Error) as error:
                raise UsageError(
                    f"{self.path}, line {number}: {error}: give vector_id, and vector or data, as "
                    "`subscribe` and a replay tell them"
                ) from None

    def _row(self, told: dict[str, Any]) -> Row:
        vector_id, vector, data = told.get("vector_id"), told.get("vector"), told.get("data")
        namespace = told.get("namespace")
        namespace = DEFAULT_NAMESPACE if namespace is None else namespace
        if not isinstance(vector_id, str) or not isinstance(namespace, str):
            raise ValueError("vector_id and namespace have to be text")
        value: bytes | None = None
        if told.get("alive") is False:
            kind = Kind.DELETE
        elif vector is not None:
            with np.errstate(over="ignore"):
                kind, value = Kind.CREATE, np.array(vector, "<f4").tobytes()
        else:
            kind, value = Kind.OPAQUE, base64.b64decode(data or "", validate=True)
        metadata = told.get("metadata")
        self.tell_metadata |= "metadata" in told
        text = metadata if metadata is None or isinstance(metadata, str) else json.dumps(metadata)
        origin = int(str(told.get("origin") or "0"), 16)
        key = (signed(int(told.get("lamport") or 0)), signed(origin), signed(int(told.get("counter") or 0)))
        offset = told.get("offset")
        return (
            namespace,
            vector_id,
            FORMS[kind],
            value,
            text,
            0,
            *key,
            NOWHERE if offset is None else int(offset),
        )
