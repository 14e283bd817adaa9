"""The requests that change streams, as frozen values. A `Description` of the changed stream answers each.

With `dry_run` the service checks the request and answers as if it had done it, but changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CreateStream:
    """A request to create a stream. `settings`: by name; an absent one is as the service has it.

    `if_not_exists`: a stream that exists already, with as many partitions and these settings, is described,
    not refused.
    """

    name: str
    partitions: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    if_not_exists: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class AlterStream:
    """A request to change settings of a stream. `settings`: None resets one to that of the service."""

    name: str
    settings: Mapping[str, Any] = dataclasses.field(hash=False)
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class DeleteStream:
    """A request to delete a stream; the answer describes it as it was."""

    name: str
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class TruncateStream:
    """A request to remove the rows of a partition below the offset `before`."""

    name: str
    before: int
    partition: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class EraseVector:
    """A request to erase a vector of a stream from all files. `namespace`: None for the default one.

    The answer comes once that is done; a refusal after `timeout_ms`.
    """

    name: str
    vector_id: str
    namespace: str | None = None
    timeout_ms: int = 30_000
    dry_run: bool = False
