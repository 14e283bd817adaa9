"""What a program hands to the Python interface by mistake: each is told at once, by name, with its cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


# --- where the log is kept


@pytest.mark.parametrize("data", [5, [], b"w/bb", True, 1.5, "", "a\0b"], ids=repr)
def test_data_that_is_no_path_is_refused_and_makes_nothing(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^data .*: (give|a \w+ is not a path: give)|^data .* give a path"):
        Propagator(data=data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [{"settings": {}}, {"log": {}}, {"log": []}], ids=repr)
def test_empty_settings_of_another_class_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is not a (Log)?Settings: create one with"):
        Propagator(**given)


def test_log_settings_without_a_directory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"log: LogSettings .*: give data=DIR too"):
        Propagator(log=LogSettings())


def test_a_place_where_no_directory_can_be_is_told_with_its_cure(tmp_path: Path) -> None:
    file = tmp_path / "five.jsonl"
    file.write_text("5\n")

    async def opened(data: str | Path) -> None:
        async with Propagator(data=data):
            raise AssertionError("it opened")

    for data, told in (
        ("/proc/x", r"'/proc/x': nothing can be made in '/proc' .*: let the user of this process do so"),
        (file, "five.jsonl' is not a directory: name another one for the data"),
        (file / "below", "five.jsonl' is not a directory: name another one"),
    ):
        with pytest.raises(UsageError, match=told):
            anyio.run(opened, data)
    assert file.read_text() == "5\n"
