"""Write the golden directory of this version: `python -m tests.golden.write_golden_directory NAME`.

Run it for a version that writes something new to disk, with a new name: existing directories are never
replaced, since they prove that old directories can be read.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from tests.delta_prop.server.jobs import part_deltas, serve_jobs, stage
from tests.golden.directory_history import SETTINGS, service, write_directory
from tests.golden.reading import query_service, read_content

HERE = Path(__file__).parent
NOT_STORED = ("lock", "reserve")


def main(name: str) -> None:
    """Write the directory and its expected content."""
    disk = write_directory()
    files = {
        path: disk.peek(path) for path in disk.paths() if not path.endswith(NOT_STORED)
    } | staged_job_files()
    expected = {"kept": read_content(disk), "served": serve_and_query(files)}
    packed = HERE / f"{name}.tar.gz"
    with packed.open("xb") as file:
        file.write(gzip.compress(_pack_tar(files), mtime=0))
    text = json.dumps(expected, ensure_ascii=False, indent=1, sort_keys=True)
    packed.with_name(f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(
        f"{packed}: {packed.stat().st_size} bytes, {len(files)} files, {len(expected['kept']['rows'])} rows"
    )


def staged_job_files() -> dict[str, bytes]:
    """Return the files of a job that is staged and not yet decided."""
    disk = SimDisk(1)
    with serve_jobs(disk) as server:
        stage(server.address, 1, 0, part_deltas(1, 12))
        return {path: disk.peek(path) for path in disk.paths() if path.startswith("jobs/")}


def serve_and_query(files: dict[str, bytes]) -> dict[str, object]:
    """Return the answers of a service that opens these files."""
    disk = SimDisk()
    for path, content in files.items():
        disk.put(path, content)

    async def run() -> dict[str, object]:
        async with service(disk, 9, SETTINGS) as p:
            answers = await query_service(p)
        return answers  # noqa: RET504 - an `async with` may swallow what is raised in it

    return run_virtual(run)


def unpack(packed: Path) -> dict[str, bytes]:
    """Return the files of a golden directory by path."""
    with tarfile.open(packed) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def _pack_tar(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


if __name__ == "__main__":
    main(*sys.argv[1:])
