"""Jobs on Spark that emit deltas and read them; the only place that knows Spark.

The public names, loaded when first used. Whoever lacks Spark is told what brings it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.spark.sessions import session
    from delta_prop.spark.source import register

_HOME_OF = {
    "register": "delta_prop.spark.source",
    "session": "delta_prop.spark.sessions",
}

__all__ = ["register", "session"]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from delta_prop.spark.java import check_packages

    check_packages()
    # Not kept here: a name may be that of the module which has it.
    found: object = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
