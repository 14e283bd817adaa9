"""Directories that earlier versions wrote are read without a change, and a service can continue them.

Each is a packed directory with its content as JSON; `write_golden_directory.py` describes how to add one. A
directory of an earlier format is migrated first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, create
from delta_prop.cli import main
from delta_prop.testing import run_virtual
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.segments.identity import FORMAT, read_format
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from tests.delta_prop.durable.quarantined import RejectingSink, Store
from tests.golden.directory_history import ADDS, AUDIT, IMPORTER, SETTINGS, service
from tests.golden.migrating import disk_of, migrate_files
from tests.golden.reading import read_content
from tests.golden.write_golden_directory import HERE, serve_and_query, unpack

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = sorted(HERE.glob("*.tar.gz"))
EACH_DIRECTORY = pytest.mark.parametrize("packed", GOLDEN, ids=lambda path: path.name.removesuffix(".tar.gz"))


def read_expected(packed: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(
        packed.with_name(packed.name.removesuffix(".tar.gz") + ".json").read_text(encoding="utf-8")
    )
    return expected


def current_files(packed: Path) -> dict[str, bytes]:
    """Return the files in the current format."""
    directory_format = read_format(disk_of(files := unpack(packed)))
    assert directory_format is not None
    return migrate_files(files) if directory_format.number < FORMAT else files


def unpack_to(packed: Path, root: Path) -> dict[Path, bytes]:
    return write_files(current_files(packed), root)


def write_files(contents: dict[str, bytes], root: Path) -> dict[Path, bytes]:
    files = {root / path: content for path, content in contents.items()}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


def test_newest_golden_directory_holds_every_kind_of_data() -> None:
    assert GOLDEN
    expected = read_expected(GOLDEN[-1])["kept"]
    assert set(expected["frames_by_codec"]) == {"0", "1", "2"}
    assert len(expected["epochs"]) == 2
    assert expected["segments"] >= 5
    assert expected["snapshot"]["rows"]
    assert {name.rpartition(".")[2] for name in expected["states"]} >= {"checkpoint"}
    assert expected["cursors"][AUDIT]["processed"] == expected["offsets"][1]
    assert expected["groups"]
    assert expected["quarantines"][ADDS]["held"]
    rows = expected["rows"]
    assert {"create", "sparse", "sparse_add", "opaque", "metadata"} <= {row.get("op") for row in rows}
    for name in ("void", "id", "parents", "metadata", "topics", "priority", "timestamp"):
        assert any(row.get(name) for row in rows), name
    assert any(row.get("sent_clock") for row in rows)
    assert all(packed.stat().st_size < 100_000 for packed in GOLDEN)


@EACH_DIRECTORY
def test_golden_directory_is_read_without_changing_a_byte(packed: Path, tmp_path: Path) -> None:
    files = unpack_to(packed, tmp_path)
    content = json.loads(json.dumps(read_content(LocalDisk(tmp_path))))
    expected = read_expected(packed)["kept"]
    for name, cursor in content["cursors"].items():  # a later version may add fields
        content["cursors"][name] = {field: cursor[field] for field in expected["cursors"][name]}
    for part in expected:
        assert content[part] == expected[part], part
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@EACH_DIRECTORY
def test_service_opens_golden_directory(packed: Path) -> None:
    answers, expected = (
        json.loads(json.dumps(serve_and_query(current_files(packed)))),
        read_expected(packed)["served"],
    )
    assert {name: answers[name] for name in expected} == expected
    assert answers["notes"] == []


@EACH_DIRECTORY
def test_sinks_and_producers_resume_in_golden_directory(packed: Path) -> None:
    expected = read_expected(packed)
    end, watermark = expected["kept"]["offsets"][1], expected["served"]["watermarks"][IMPORTER]
    disk, delivered = SimDisk(), list[int]()
    for path, content in current_files(packed).items():
        disk.put(path, content)

    async def run() -> None:
        async with service(disk, 3, SETTINGS) as p:
            await p.attach(CallbackSink(lambda offset, _: delivered.append(offset), name=AUDIT))
            await p.attach(RejectingSink(Store(keeps_cursor=False), set()), name="adds", topics="ns:adds")
            held = expected["kept"]["quarantines"][ADDS]["held"]
            assert [row.offset for row in p.quarantine(ADDS)] == [int(offset) for offset in held]
            importer = p.producer(IMPORTER)
            published = await importer.publish(Delta("doc-3", create([0.5] * 320), "docs"))
            assert published.offset == end
            assert published.dot is not None
            assert published.dot.counter == watermark + 1
            await p.wait_visible(published)
            assert delivered == [end]
            assert (await p.replay(ADDS)).applied == 2, "the rejected row and its dependent must be applied"
            await anyio.sleep(1)
            assert not p.quarantine(ADDS)

    run_virtual(run)


@EACH_DIRECTORY
@pytest.mark.parametrize(
    ("arguments", "expected_output"),
    [
        (["log", "verify"], "intact"),
        (["log", "show"], "doc-9"),
        (["status"], "intact"),
        (["sinks"], AUDIT),
        (["quarantine", "list"], "7 is bad"),
        (["get", "one", "--namespace", "ids"], '"vector": [1.0]'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_read_golden_directory(
    packed: Path,
    arguments: list[str],
    expected_output: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = unpack_to(packed, tmp_path)
    assert main([*arguments, "--data", str(tmp_path)]) == 0
    assert expected_output in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
