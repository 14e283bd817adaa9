"""Jobs on Spark that write and read deltas; the only package that depends on Spark.

It loads its public names on first use, and reports missing packages with the command that installs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.spark.data_source.segments import deltas_of
    from delta_prop.spark.data_source.sessions import session
    from delta_prop.spark.data_source.source import register
    from delta_prop.spark.jobs.auditing import audit, repair, repairs
    from delta_prop.spark.jobs.counting import stats
    from delta_prop.spark.jobs.diffing import deltas_from, diff
    from delta_prop.spark.jobs.importing import to_deltas
    from delta_prop.spark.jobs.rebuilding import rebuild
    from delta_prop.spark.jobs.replaying import CONTENT, replay
    from delta_prop.spark.states.sink_contents import contents_of

_HOME_OF = {
    "CONTENT": "delta_prop.spark.jobs.replaying",
    "audit": "delta_prop.spark.jobs.auditing",
    "contents_of": "delta_prop.spark.states.sink_contents",
    "deltas_from": "delta_prop.spark.jobs.diffing",
    "deltas_of": "delta_prop.spark.data_source.segments",
    "diff": "delta_prop.spark.jobs.diffing",
    "rebuild": "delta_prop.spark.jobs.rebuilding",
    "register": "delta_prop.spark.data_source.source",
    "repair": "delta_prop.spark.jobs.auditing",
    "repairs": "delta_prop.spark.jobs.auditing",
    "replay": "delta_prop.spark.jobs.replaying",
    "session": "delta_prop.spark.data_source.sessions",
    "stats": "delta_prop.spark.jobs.counting",
    "to_deltas": "delta_prop.spark.jobs.importing",
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
    # The name is not cached here, as it may also be the name of its module.
    value: object = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
