"""TOML text, read into a table; whatever is wrong with it is told in one line."""

from __future__ import annotations

import tomllib
from typing import Any

from delta_prop_wire.errors import UsageError


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Parse `text`; `what` names it for people. Raises UsageError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why = str(error)
    except ValueError:  # Python's own bound
        why = "a number in it has more digits than can be read: give a smaller one"
    except RecursionError:
        why = "its lists or tables lie too deep in each other: take some apart"
    raise UsageError(f"{what} is no TOML: {why}")
