"""The catalogue of streams: what names and settings are accepted, ids, crashes at every call of the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_broker.catalogue.catalogue import PARTITIONS_TOTAL_MAX, STREAM_ID_MAX, Catalogue
from delta_prop_broker.catalogue.store import (
    place_of,
    read_catalogue,
    remove_deleted,
    stream_directory,
    write_catalogue,
)
from delta_prop_broker.catalogue.stream import (
    DEFAULT_STREAM,
    NAME_CHARACTERS_MAX,
    Stream,
    StreamSettings,
    check_stream_name,
)
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.segments.paths import CATALOGUE_PATH, DIRECTORY, STREAMS
from delta_prop_broker.segments.small_file import Checksum, replace_checked
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

NAMES = st.from_regex(r"\A[A-Za-z0-9.-][A-Za-z0-9._-]{0,20}\Z").filter(lambda name: name not in (".", ".."))


def create(catalogue: Catalogue, name: str, partitions: int = 3, **settings: object) -> Catalogue:
    return catalogue.create(
        name,
        partitions=partitions,
        settings=StreamSettings(**settings),
        now_us=7,  # type: ignore[arg-type]
    )


def test_new_directory_has_the_default_stream_where_its_log_has_always_been() -> None:
    catalogue = read_catalogue(SimDisk())
    assert list(catalogue.streams) == [DEFAULT_STREAM]
    assert place_of(catalogue.require(DEFAULT_STREAM), 0) == (DIRECTORY, "", (0, 0))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a b", "ä", "a\n", "x" * (NAME_CHARACTERS_MAX + 1), "_own", None, 7, b"a"],
)
def test_invalid_name_is_refused_in_one_line(name: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_stream_name(name)
    assert "\n" not in str(caught.value)
    assert "give" in str(caught.value)


def test_longest_name_gives_a_directory_that_file_systems_accept() -> None:
    stream = Stream(check_stream_name("x" * NAME_CHARACTERS_MAX), STREAM_ID_MAX)
    assert len(stream_directory(stream).removeprefix(f"{STREAMS}/")) <= 255


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=30))
def test_ids_and_directories_are_never_used_twice(steps: list[tuple[str, bool]]) -> None:
    catalogue, ids, directories = Catalogue(), [0], {f"{STREAMS}/{DEFAULT_STREAM}"}
    for name, stays in steps:
        if name in catalogue.streams:
            continue
        catalogue = create(catalogue, name)
        stream = catalogue.require(name)
        assert stream.stream_id > max(ids)
        assert stream_directory(stream).lower() not in directories  # some file systems ignore the case
        ids.append(stream.stream_id)
        directories.add(stream_directory(stream).lower())
        if not stays:
            catalogue = catalogue.delete(name)
            catalogue = catalogue.note_files_removed(stream)
        catalogue = Catalogue.unpack(catalogue.pack())


@given(NAMES, st.integers(1, 100), st.booleans())
def test_packed_catalogue_equals_what_is_read(name: str, partitions: int, is_deleted: bool) -> None:
    catalogue = create(Catalogue(), f"{name}.x", partitions, retention_s=5.5, compress="lz4")
    catalogue = catalogue.delete(f"{name}.x") if is_deleted else catalogue
    assert Catalogue.unpack(catalogue.pack()) == catalogue


def test_creation_is_refused_where_it_would_hide_or_exceed_something() -> None:
    catalogue = create(Catalogue(), "orders")
    with pytest.raises(UsageError, match="exists already"):
        create(catalogue, "orders")
    unchanged = catalogue.create(
        "orders", partitions=3, settings=StreamSettings(), now_us=9, if_not_exists=True
    )
    assert unchanged is catalogue
    with pytest.raises(UsageError, match="3 partitions, not 4"):
        catalogue.create("orders", partitions=4, settings=StreamSettings(), now_us=9, if_not_exists=True)
    for count in (0, -1, PARTITIONS_TOTAL_MAX + 1, True, 1.5, "3"):
        with pytest.raises(UsageError, match="partitions = "):
            create(catalogue, "more", count)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"would have {PARTITIONS_TOTAL_MAX + 1}"):
        create(catalogue, "more", PARTITIONS_TOTAL_MAX - 3)
    with pytest.raises(UsageError, match="all 4294967295 stream ids"):
        create(replace(catalogue, last_id=STREAM_ID_MAX), "more")


def test_creation_of_a_present_stream_compares_the_given_settings() -> None:
    catalogue = create(Catalogue(), "orders", retention_s=60)

    def create_present(**settings: Any) -> Catalogue:
        given = StreamSettings(**settings)
        return catalogue.create("orders", partitions=3, settings=given, now_us=9, if_not_exists=True)

    assert create_present(retention_s=60.0) is catalogue
    with pytest.raises(UsageError, match="its retention_s is 60, not 5: change it with `streams alter`"):
        create_present(retention_s=5)
    with pytest.raises(UsageError, match="its compress is the service's, not 'lz4'"):
        create_present(retention_s=60, compress="lz4")


def test_quotas_are_stored_with_the_stream_and_not_settings_of_its_logs() -> None:
    catalogue = create(Catalogue(), "orders", bytes_in_s=1_000_000, rows_out_s=2.5)
    settings = Catalogue.unpack(catalogue.pack()).require("orders").settings
    expected = {"bytes_in_s": 1_000_000, "rows_in_s": None, "bytes_out_s": None, "rows_out_s": 2.5}
    assert settings.quotas() == expected
    assert settings.log_settings(LogSettings()) == LogSettings()
    assert settings.changed({"bytes_in_s": None}).to_json() == {"rows_out_s": 2.5}


def test_alter_changes_only_what_is_given() -> None:
    catalogue = create(Catalogue(), "orders", retention_s=60.0, compact=True)
    altered = catalogue.alter(
        "orders", {"compact": None, "retention_bytes": 5_000_000, "ack_level": "logged"}
    ).require("orders")
    assert altered == replace(
        catalogue.require("orders"),
        settings=StreamSettings(retention_s=60.0, retention_bytes=5_000_000, ack_level="logged"),
    )
    service = LogSettings(retention_s=9.0)
    assert altered.settings.log_settings(service) == replace(
        service, retention_s=60.0, retention_bytes=5_000_000, ack_level=AckLevel.LOGGED
    )
    for changes, words in (
        ({"partitions": 4}, "has 3 for its life"),
        ({"retention": 4}, "not a setting"),
        ({"retention_s": -1}, "above 0"),
        ({"compress": "sometimes"}, "compress"),
        ({"ack_level": "quick"}, "ack level 'quick': give memory, logged or durable"),
        ({"compact": "no"}, "true or false"),
        ({"bytes_in_s": 0}, "bytes_in_s = 0: give a number above 0"),
        ({"rows_out_s": -1.5}, "rows_out_s = -1.5: give"),
        ({"rows_in_s": True}, "rows_in_s = True: give"),
        ({"bytes_out_s": "1"}, "bytes_out_s = '1': give"),
        ({"bytes_out_s": float("inf")}, "bytes_out_s = inf: give"),
        ({"rows_in_s": COUNTER_MAX + 1}, f"rows_in_s = {COUNTER_MAX + 1}: give at most {COUNTER_MAX}"),
        ({"retention_s": float("inf")}, "retention_s = inf: give a finite number"),
    ):
        with pytest.raises(UsageError, match=words):
            catalogue.alter("orders", changes)


def test_unknown_stream_is_refused_with_the_known_ones() -> None:
    catalogue = create(Catalogue(), "orders")
    calls: list[Callable[[], object]] = [
        lambda: catalogue.require("order"),
        lambda: catalogue.find(9),
        lambda: catalogue.alter("order", {}),
        lambda: catalogue.delete("order"),
    ]
    for call in calls:
        with pytest.raises(Refused, match="default, orders") as caught:
            call()
        assert caught.value.code is ErrorCode.UNKNOWN_STREAM
    with pytest.raises(UsageError, match="truncate it instead"):
        catalogue.delete(DEFAULT_STREAM)


@pytest.mark.parametrize(
    "text",
    [b"nonsense", b"[]", b"{}", b'{"version": 2}', Catalogue().pack().replace(b'"default"', b'"other"')],
)
def test_file_with_a_right_checksum_and_wrong_content_is_corruption(text: bytes) -> None:
    disk = SimDisk()
    write_catalogue(disk, Catalogue())
    replace_checked(disk, CATALOGUE_PATH, text, Checksum.FIRST_LINE)
    with pytest.raises(LogCorrupted, match="not a catalogue"):
        read_catalogue(disk)


def run_scenario(disk: SimDisk, seen: list[Catalogue]) -> None:
    """Create, alter and delete streams, with files in their partitions; `seen` gets each state asked for."""

    def write(catalogue: Catalogue) -> Catalogue:
        seen.append(catalogue)
        write_catalogue(disk, catalogue)
        return catalogue

    catalogue = write(create(Catalogue(), "orders"))
    catalogue = write(create(catalogue, "rows", 1))
    for stream in list(catalogue.streams.values())[1:]:
        for partition in range(stream.partitions):
            place = place_of(stream, partition)
            for directory in (place.log_path, f"{place.state_path}/quarantine", place.state_path):
                disk.make_directory(directory)
                file = disk.open(f"{directory}/00.log", create=True)
                file.write(0, [b"secret"])
                file.sync()
                file.close()
                disk.sync_directory(directory)
    catalogue = write(catalogue.alter("rows", {"retention_s": 5.0}))
    catalogue = write(catalogue.delete("orders"))
    for stream in catalogue.removed:
        seen.append(catalogue.note_files_removed(stream))
    catalogue = remove_deleted(disk, catalogue)
    write(create(catalogue, "orders", 2))


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_crash_at_every_call_leaves_the_old_or_the_new_catalogue(is_power_cut: bool, full: bool) -> None:
    reference = SimDisk()
    run_scenario(reference, [])
    calls = [call for call in reference.trace if call.name in CHANGING]
    assert len(calls) > 60
    for number in [call.number for call in calls]:
        for seed in range(10 if full else 2):
            disk, seen = SimDisk(seed), [Catalogue()]
            disk.crash_at(number, "after" if seed % 2 else "before")
            with pytest.raises(SimCrash):
                run_scenario(disk, seen)
            after = disk.crash() if is_power_cut else disk.kill()
            found = read_catalogue(after)
            assert found in seen[-2:]
            cleaned = remove_deleted(after, found)
            assert not cleaned.removed
            known = {stream_directory(stream) for stream in cleaned.streams.values()}
            left = {f"{STREAMS}/{name}" for name in after.list(STREAMS)} - known
            assert not [path for path in left if not path.startswith(CATALOGUE_PATH)]
