"""Fixtures of the command's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.delta_prop.commands.support import Command

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command on a data directory of its own."""
    return Command(tmp_path, capsys)
