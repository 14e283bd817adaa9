"""Directories that earlier versions wrote are read as they were written, and gone on with.

Each is a packed directory with its content beside it as JSON; `make.py` says how one is added. One of an
earlier format is migrated before.
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
from delta_prop_broker.log.files.identity import FORMAT, read_format
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from tests.delta_prop.durable.quarantined import RejectingSink, Store
from tests.golden.make import HERE, serve, unpacked
from tests.golden.migrating import disk_of, migrated
from tests.golden.reading import kept
from tests.golden.story import ADDS, AUDIT, IMPORTER, SETTINGS, service

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = sorted(HERE.glob("*.tar.gz"))
EACH = pytest.mark.parametrize("packed", GOLDEN, ids=lambda path: path.name.removesuffix(".tar.gz"))


def expected(packed: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        packed.with_name(packed.name.removesuffix(".tar.gz") + ".json").read_text(encoding="utf-8")
    )
    return found


def present(packed: Path) -> dict[str, bytes]:
    """The files in the present format."""
    found = read_format(disk_of(files := unpacked(packed)))
    assert found is not None
    return migrated(files) if found.number < FORMAT else files


def laid_out(packed: Path, root: Path) -> dict[Path, bytes]:
    return laid_out_as(present(packed), root)


def laid_out_as(contents: dict[str, bytes], root: Path) -> dict[Path, bytes]:
    files = {root / path: content for path, content in contents.items()}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


def test_there_is_one_and_it_holds_one_of_everything() -> None:
    assert GOLDEN
    told = expected(GOLDEN[-1])["kept"]
    assert set(told["frames_by_codec"]) == {"0", "1", "2"}
    assert len(told["epochs"]) == 2
    assert told["segments"] >= 5
    assert told["snapshot"]["rows"]
    assert {name.rpartition(".")[2] for name in told["states"]} >= {"checkpoint"}
    assert told["cursors"][AUDIT]["processed"] == told["offsets"][1]
    assert told["groups"]
    assert told["quarantines"][ADDS]["held"]
    rows = told["rows"]
    assert {"create", "sparse", "sparse_add", "opaque", "metadata"} <= {row.get("op") for row in rows}
    for name in ("void", "id", "parents", "metadata", "topics", "priority", "timestamp"):
        assert any(row.get(name) for row in rows), name
    assert any(row.get("sent_clock") for row in rows)
    assert all(packed.stat().st_size < 100_000 for packed in GOLDEN)


@EACH
def test_it_is_read_as_it_was_written_and_not_a_byte_is_changed(packed: Path, tmp_path: Path) -> None:
    files = laid_out(packed, tmp_path)
    found = json.loads(json.dumps(kept(LocalDisk(tmp_path))))
    told = expected(packed)["kept"]
    for name, cursor in found["cursors"].items():  # what a later version adds to it is its own
        found["cursors"][name] = {part: cursor[part] for part in told["cursors"][name]}
    for part in told:
        assert found[part] == told[part], part
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@EACH
def test_a_service_goes_on_with_it(packed: Path) -> None:
    found, told = json.loads(json.dumps(serve(present(packed)))), expected(packed)["served"]
    assert {name: found[name] for name in told} == told
    assert found["notes"] == []


@EACH
def test_its_sinks_and_producers_go_on_where_they_stopped(packed: Path) -> None:
    told = expected(packed)
    end, watermark = told["kept"]["offsets"][1], told["served"]["watermarks"][IMPORTER]
    disk, seen = SimDisk(), list[int]()
    for path, content in present(packed).items():
        disk.put(path, content)

    async def run() -> None:
        async with service(disk, 3, SETTINGS) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name=AUDIT))
            await p.attach(RejectingSink(Store(keeps_cursor=False), set()), topics="ns:adds")
            held = told["kept"]["quarantines"][ADDS]["held"]
            assert [one.offset for one in p.quarantine(ADDS)] == [int(offset) for offset in held]
            importer = p.producer(IMPORTER)
            published = await importer.publish(Delta("doc-3", create([0.5] * 320), "docs"))
            assert published.offset == end
            assert published.dot is not None
            assert published.dot.counter == watermark + 1
            await p.wait_visible(published)
            assert seen == [end]
            assert (await p.replay(ADDS)).applied == 2, "with what lined up behind it"
            await anyio.sleep(1)
            assert not p.quarantine(ADDS)

    run_virtual(run)


@EACH
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["log", "verify"], "sound"),
        (["log", "show"], "redaktor"),
        (["status"], "sound"),
        (["sinks"], AUDIT),
        (["quarantine", "list"], "7 is bad"),
        (["get", "one", "--namespace", "ids"], '"vector": [1.0]'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_reads_it(
    packed: Path, arguments: list[str], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = laid_out(packed, tmp_path)
    assert main([*arguments, "--data", str(tmp_path)]) == 0
    assert shown.replace("redaktor", "doc-9") in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
