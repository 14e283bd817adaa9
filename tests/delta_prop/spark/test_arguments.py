"""Wrong arguments to the Spark functions: each is reported before Spark is called."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Propagator
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError

pytest.importorskip("pyspark")
spark = pytest.importorskip("delta_prop.spark")

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeSession:
    """A session that must not be used."""

    def range(self, *_: object) -> Any:
        raise AssertionError("the session was used")


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with Propagator(data=tmp_path / "facts") as p:
            await p.publish(Delta("v", create([1.0])))

    anyio.run(fill)
    return tmp_path / "facts"


@pytest.mark.parametrize("wrong", [None, "local", 5])
def test_wrong_session_is_refused(wrong: Any, facts: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: spark.replay(wrong, facts),
        lambda: spark.stats(wrong, facts),
        lambda: spark.audit(wrong, facts, "store.db"),
        lambda: spark.rebuild(wrong, facts, "store.db"),
        lambda: spark.deltas_of(wrong, facts),
        lambda: spark.register(wrong),
        lambda: spark.contents_of(wrong, []),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"spark: type .* is not a Spark session: .*session\(\)"):
            call()


@pytest.mark.parametrize("wrong", [None, 5, "", b"facts"])
def test_wrong_path_is_refused(wrong: Any, facts: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: spark.replay(FakeSession(), wrong),
        lambda: spark.stats(FakeSession(), wrong),
        lambda: spark.audit(FakeSession(), wrong, "store.db"),
        lambda: spark.audit(FakeSession(), facts, wrong),
        lambda: spark.rebuild(FakeSession(), wrong, "store.db"),
        lambda: spark.rebuild(FakeSession(), facts, wrong),
        lambda: spark.deltas_of(FakeSession(), wrong),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"(source|path|sink|file) .*: give a "):
            call()


@pytest.mark.parametrize("wrong", ["soon", -1, True, 1.5, "2099-01-01", datetime(2099, 1, 1, tzinfo=UTC)])
def test_wrong_log_position_is_refused(wrong: Any, facts: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: spark.replay(FakeSession(), facts, wrong),
        lambda: spark.rebuild(FakeSession(), facts, "store.db", at=wrong),
        lambda: spark.stats(FakeSession(), facts, start=wrong),
        lambda: spark.stats(FakeSession(), facts, end=wrong),
        lambda: spark.deltas_of(FakeSession(), facts, start=wrong),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"(at|start|end) .*(in the future|: give .*an offset)"):
            call()


def test_wrong_table_is_refused() -> None:
    for call in (
        lambda: spark.diff(None, None),
        lambda: spark.to_deltas("facts.parquet"),
        lambda: list(spark.repairs([])),
    ):
        with pytest.raises(UsageError, match=r"is not a DataFrame: .*spark\.read"):
            call()


def test_words_and_paths_are_accepted(facts: Path) -> None:
    for position in ("now", 0, None):
        with pytest.raises(AssertionError, match="the session was used"):
            spark.replay(FakeSession(), facts, position)
    with pytest.raises(AssertionError, match="the session was used"):
        spark.deltas_of(FakeSession(), str(facts), start="earliest", end="latest")
