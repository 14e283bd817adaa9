"""Fixtures for tests of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.delta_prop.commands.server_thread import served
from tests.delta_prop.commands.support import Command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a runner of commands on an empty data directory."""
    return Command(tmp_path, capsys)


@pytest.fixture(params=["directory", "server"])
def local_or_remote(command: Command, request: pytest.FixtureRequest) -> Iterator[Command]:
    """Yield a runner of commands on a data directory in one run of the test, and on a server in the other."""
    if request.param == "directory":
        yield command
    else:
        with served(command.data) as command.addresses:
            yield command
