"""The catalogue's file, and the directories of the streams' partitions.

The file is written before the directories of a new stream, and after its stream is gone before the
directories of a deleted one: so after a crash at any point, a stream is there with all its partitions, or
not at all, and `remove_deleted` finishes what was interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.catalogue.catalogue import Catalogue
from delta_prop_broker.catalogue.stream import DEFAULT_ID, Stream
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.paths import CATALOGUE_PATH, DIRECTORY, STREAMS
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked
from delta_prop_wire.errors import UsageError
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

_BYTES_MAX = 64 * 1024 * 1024
_STATE_SUFFIX = "-state"
_NAME_CHARACTERS = 200
"""How many characters of a stream's name are part of its directory's, which 255 bytes bound."""


def read_catalogue(disk: Disk) -> Catalogue:
    """Read the catalogue; without a file there is only the default stream. Raises LogCorrupted, OSError."""
    raw = read_checked(disk, CATALOGUE_PATH, Checksum.FIRST_LINE, bytes_max=_BYTES_MAX)
    if raw is None:
        return Catalogue()
    try:
        return Catalogue.unpack(raw)
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise LogCorrupted(CATALOGUE_PATH, f"it is not a catalogue of streams: {error}") from None


def write_catalogue(disk: Disk, catalogue: Catalogue) -> None:
    """Replace the catalogue; durable when this returns. Raises OSError."""
    disk.make_directory(STREAMS)
    disk.sync_directory("")
    replace_checked(disk, CATALOGUE_PATH, catalogue.pack(), Checksum.FIRST_LINE)


def stream_directory(stream: Stream) -> str:
    """Return the directory of a stream. Its id makes it unique: a name can be used again."""
    if stream.stream_id == DEFAULT_ID:
        return f"{STREAMS}/{stream.name}"
    return f"{STREAMS}/{stream.name[:_NAME_CHARACTERS]}-{stream.stream_id}"


class PartitionPlace(NamedTuple):
    """The place of a partition: the directory of its log, and that of what belongs to the log's readers.

    `name`: for the stamps of the log.
    """

    log_path: str
    state_path: str
    name: LogName


PLACE_OF_DEFAULT = PartitionPlace(DIRECTORY, "", DEFAULT_LOG)


def place_of(stream: Stream, partition: int) -> PartitionPlace:
    """Return the place of a partition; the default stream's is where it was before streams existed."""
    directory = stream_directory(stream)
    state = "" if stream.stream_id == DEFAULT_ID else f"{directory}/{partition}{_STATE_SUFFIX}"
    return PartitionPlace(f"{directory}/{partition}", state, LogName(stream.stream_id, partition))


def remove_deleted(disk: Disk, catalogue: Catalogue) -> Catalogue:
    """Remove the files of deleted streams; return the catalogue without them. Durable. Raises OSError."""
    for stream in catalogue.removed:
        directory = stream_directory(stream)
        if directory.rpartition("/")[2] in disk.list(STREAMS):
            _remove_directory(disk, directory)
            disk.sync_directory(STREAMS)
        catalogue = catalogue.note_files_removed(stream)
        write_catalogue(disk, catalogue)
    return catalogue


def _remove_directory(disk: Disk, directory: str) -> None:
    for name in disk.list(directory):
        path = f"{directory}/{name}"
        try:
            disk.remove(path)
        except IsADirectoryError:
            _remove_directory(disk, path)
    disk.remove_directory(directory)
