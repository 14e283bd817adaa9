"""One bit turned over in any file of a directory: told and left alone, told and made anew, or without effect.

Never is a wrong answer given, and never a shorter log. Each kind of file has tests of its own that turn over
every bit; here every kind lies in one directory, and it is the whole service that reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop_wire.errors import DeltaPropError
from tests.golden.make import serve
from tests.golden.migrating import disk_of
from tests.golden.reading import kept
from tests.golden.test_golden import EACH, expected, present

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = (".log", "/log", "format", ".snapshot", ".journal", ".cursor")
"""Kinds without which something would be missing: they are refused with their name, where they are read."""
MADE_ANEW = (".index", "mark", "/time", ".checkpoint", ".part", "cursors")
"""Kinds that lag or can be made anew."""


def kind_of(path: str) -> str:
    return next(kind for kind in (*REFUSED, *MADE_ANEW) if path.endswith(kind))


def flipped(files: dict[str, bytes], path: str, at: int) -> dict[str, bytes]:
    raw = bytearray(files[path])
    raw[at] ^= 1 << at % 8
    return {**files, path: bytes(raw)}


def told(read: Any, files: dict[str, bytes]) -> Any:
    """Return the result as JSON data, or the error."""
    try:
        return json.loads(json.dumps(read(files)))
    except DeltaPropError as error:
        return error


@EACH
def test_a_flipped_bit_anywhere_is_told_or_has_no_effect(
    packed: Path, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files, sound = present(packed), expected(packed)
    outcomes: Counter[str] = Counter()
    newest = {kind_of(path): path for path in sorted(files)}
    for path, raw in files.items() if full else ((path, files[path]) for path in newest.values()):
        kind, step = kind_of(path), max(len(raw) // (40 if full else 2), 1)
        for at in range(len(path) % step, len(raw), step):
            changed = flipped(files, path, at)
            caplog.clear()
            looked = told(lambda files: kept(disk_of(files)), changed)
            served = told(serve, changed)
            for found in (looked, served):
                if isinstance(found, DeltaPropError):
                    assert kind in REFUSED, f"{path}, byte {at}: {found}"
                    assert path in str(found) or path.rpartition("/")[2] in str(found), f"{path}: {found}"
            if isinstance(looked, dict):
                for part in ("log_id", "epochs", "offsets", "segments", "rows"):
                    assert looked[part] == sound["kept"][part], f"{path}, byte {at}: {part}"
            if isinstance(served, dict):
                notes = served.pop("notes")
                assert served == {name: sound["served"][name] for name in served}, f"{path}, byte {at}"
                warned = any("not used" in record.message for record in caplog.records)
                silent = looked == sound["kept"] and not notes and not warned
            else:
                silent = False
            told_somehow = not (isinstance(looked, dict) and isinstance(served, dict))
            outcomes[f"{kind} {'refused' if told_somehow else 'no effect' if silent else 'told'}"] += 1
    print(dict(sorted(outcomes.items())))
    assert {outcome for outcome in outcomes if outcome.endswith("refused")} == {
        f"{kind} refused" for kind in REFUSED
    }
    assert outcomes[".checkpoint told"]
    assert outcomes[".part told"]
    assert outcomes["cursors told"]
