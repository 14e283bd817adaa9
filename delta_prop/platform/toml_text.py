"""Parser of TOML text into a table; any fault is reported in one line. Pure."""

from __future__ import annotations

import tomllib
from typing import Any

from delta_prop_wire.errors import UsageError


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Parse `text`; `what` names it in messages. Raises UsageError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why = str(error)
    except ValueError:  # Python's own bound
        why = "a number in it has more digits than can be read: give a smaller one"
    except RecursionError:
        why = "its lists or tables are nested too deeply: flatten some"
    raise UsageError(f"{what} is not TOML: {why}")
