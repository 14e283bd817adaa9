"""Jobs on Spark that emit deltas and read them; the only place that knows Spark.

The public names, loaded when first used. Whoever lacks Spark is told what brings it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.spark.auditing import audit, repair, repairs
    from delta_prop.spark.counting import stats
    from delta_prop.spark.diffing import deltas_from, diff
    from delta_prop.spark.held import contents_of
    from delta_prop.spark.importing import to_deltas
    from delta_prop.spark.rebuilding import rebuild
    from delta_prop.spark.replaying import CONTENT, replay
    from delta_prop.spark.segments import deltas_of
    from delta_prop.spark.sessions import session
    from delta_prop.spark.source import register

_HOME_OF = {
    "CONTENT": "delta_prop.spark.replaying",
    "audit": "delta_prop.spark.auditing",
    "contents_of": "delta_prop.spark.held",
    "deltas_from": "delta_prop.spark.diffing",
    "deltas_of": "delta_prop.spark.segments",
    "diff": "delta_prop.spark.diffing",
    "rebuild": "delta_prop.spark.rebuilding",
    "register": "delta_prop.spark.source",
    "repair": "delta_prop.spark.auditing",
    "repairs": "delta_prop.spark.auditing",
    "replay": "delta_prop.spark.replaying",
    "session": "delta_prop.spark.sessions",
    "stats": "delta_prop.spark.counting",
    "to_deltas": "delta_prop.spark.importing",
}

__all__ = [
    "CONTENT",
    "audit",
    "contents_of",
    "deltas_from",
    "deltas_of",
    "diff",
    "rebuild",
    "register",
    "repair",
    "repairs",
    "replay",
    "session",
    "stats",
    "to_deltas",
]


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
