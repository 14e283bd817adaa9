"""A flipped bit in any file of a directory is refused, or reported and repaired, or has no effect.

No answer is wrong, and no log is shorter. Each kind of file has its own tests that flip every bit; here one
directory has every kind, and the complete service reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop_wire.errors import DeltaPropError
from tests.golden.migrating import disk_of
from tests.golden.reading import read_content
from tests.golden.test_golden import EACH_DIRECTORY, current_files, read_expected
from tests.golden.write_golden_directory import serve_and_query

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = (".log", "/log", "format", ".snapshot", ".journal", ".cursor")
"""Path endings of files that must be intact: reading a corrupted one is refused, with its name."""
REBUILT = (".index", "mark", "/time", ".checkpoint", ".part", "cursors")
"""Path endings of files that may be stale or lost, since a start corrects or rebuilds them."""


def kind_of(path: str) -> str:
    return next(kind for kind in (*REFUSED, *REBUILT) if path.endswith(kind))


def flip_bit(files: dict[str, bytes], path: str, position: int) -> dict[str, bytes]:
    raw = bytearray(files[path])
    raw[position] ^= 1 << position % 8
    return {**files, path: bytes(raw)}


def result_or_error(read_files: Any, files: dict[str, bytes]) -> Any:
    """Return the result as JSON data, or the error."""
    try:
        return json.loads(json.dumps(read_files(files)))
    except DeltaPropError as error:
        return error


@EACH_DIRECTORY
def test_flipped_bit_in_any_file_is_reported_or_has_no_effect(
    packed: Path, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files, expected = current_files(packed), read_expected(packed)
    outcomes: Counter[str] = Counter()
    newest = {kind_of(path): path for path in sorted(files)}
    for path, raw in files.items() if full else ((path, files[path]) for path in newest.values()):
        kind, step = kind_of(path), max(len(raw) // (40 if full else 2), 1)
        for position in range(len(path) % step, len(raw), step):
            changed = flip_bit(files, path, position)
            caplog.clear()
            content = result_or_error(lambda files: read_content(disk_of(files)), changed)
            served = result_or_error(serve_and_query, changed)
            for result in (content, served):
                if isinstance(result, DeltaPropError):
                    assert kind in REFUSED, f"{path}, byte {position}: {result}"
                    assert path in str(result) or path.rpartition("/")[2] in str(result), f"{path}: {result}"
            if isinstance(content, dict):
                for part in ("log_id", "epochs", "offsets", "segments", "rows"):
                    assert content[part] == expected["kept"][part], f"{path}, byte {position}: {part}"
            if isinstance(served, dict):
                notes = served.pop("notes")
                assert served == {name: expected["served"][name] for name in served}, (
                    f"{path}, byte {position}"
                )
                has_warned = any("not used" in record.message for record in caplog.records)
                has_no_effect = content == expected["kept"] and not notes and not has_warned
            else:
                has_no_effect = False
            is_refused = not (isinstance(content, dict) and isinstance(served, dict))
            outcomes[
                f"{kind} {'refused' if is_refused else 'no effect' if has_no_effect else 'reported'}"
            ] += 1
    print(dict(sorted(outcomes.items())))
    assert {outcome for outcome in outcomes if outcome.endswith("refused")} == {
        f"{kind} refused" for kind in REFUSED
    }
    assert outcomes[".checkpoint reported"]
    assert outcomes[".part reported"]
    assert outcomes["cursors reported"]
