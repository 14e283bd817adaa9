"""Rows to audit that are not in a sink's file: states of a sink in this process, or JSON lines."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np

from delta_prop.auditing.sink_file import FORMS, Row, to_signed
from delta_prop.calls.argument_checks import check_path
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.errors import UsageError

NO_OFFSET = -1
"""Offset of a row that has none."""


def rows_of_states(states: Iterable[tuple[str, str, VectorState]]) -> Iterator[Row]:
    """Convert a sink's (namespace, vector id, state) to rows. Raises UsageError."""
    for row in states:
        if (
            not isinstance(row, tuple)
            or len(row) != 3
            or not all(map(isinstance, row, (str, str, VectorState)))
        ):
            raise UsageError(
                f"sink: {row!r:.60} is not a row: give (namespace, vector_id, VectorState) for each vector"
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
        key = map(to_signed, (0, 0, 0) if state.key is None else state.key)
        yield (namespace, vector_id, FORMS[kind], value, metadata, state.ignored, *key, NO_OFFSET)


class Lines:
    """A table in JSON lines, with the columns of a replay.

    `has_metadata`: True once a line with metadata was read.
    """

    def __init__(self, path: str | PurePath) -> None:
        self.path = check_path("path", path)
        self.has_metadata = False

    def rows(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Row]:
        """Yield the row of each numbered line. Raises UsageError, with the line's number."""
        for number, line in lines:
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError("not a JSON object")
                yield self._row(fields)
            except (ValueError, TypeError, OverflowError, binascii.Error) as error:
                raise UsageError(
                    f"{self.path}, line {number}: {error}: give vector_id, and vector or data, as "
                    "`subscribe` and a replay write them"
                ) from None

    def _row(self, fields: dict[str, Any]) -> Row:
        vector_id, vector, data = fields.get("vector_id"), fields.get("vector"), fields.get("data")
        namespace = fields.get("namespace")
        namespace = DEFAULT_NAMESPACE if namespace is None else namespace
        if not isinstance(vector_id, str) or not isinstance(namespace, str):
            raise ValueError("vector_id and namespace must be text")
        value: bytes | None = None
        if fields.get("alive") is False:
            kind = Kind.DELETE
        elif vector is not None:
            with np.errstate(over="ignore"):
                kind, value = Kind.CREATE, np.array(vector, "<f4").tobytes()
        else:
            kind, value = Kind.OPAQUE, base64.b64decode(data or "", validate=True)
        metadata = fields.get("metadata")
        self.has_metadata |= "metadata" in fields
        text = metadata if metadata is None or isinstance(metadata, str) else json.dumps(metadata)
        origin = int(str(fields.get("origin") or "0"), 16)
        key = (
            to_signed(int(fields.get("lamport") or 0)),
            to_signed(origin),
            to_signed(int(fields.get("counter") or 0)),
        )
        offset = fields.get("offset")
        return (
            namespace,
            vector_id,
            FORMS[kind],
            value,
            text,
            0,
            *key,
            NO_OFFSET if offset is None else int(offset),
        )
