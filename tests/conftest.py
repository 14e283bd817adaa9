"""Shared test setup: the `--full` amounts, the profiles of hypothesis, and which tests run.

A normal run is the same every time, on every machine, except for the chaos seeds, which are new each time and
printed at the end. `--full` draws new examples too, and more of them. Tests with Spark run if there is Java,
in one worker, which starts Spark once.
"""

from __future__ import annotations

import os
import secrets
import warnings
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from delta_prop.spark.java import find_missing
from tests.exclusive_runs import hold_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

settings.register_profile(
    "normal",
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", max_examples=1_000, deadline=None, print_blob=True)


PRINTED = "print_at_end"
"""The property of a report whose value is printed at the end."""
SPARK = "delta_prop/spark/"
"""The folder of tests that start Spark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full`, `--spark` and `--first-seed`."""
    parser.addoption(
        "--full", action="store_true", help="the full amounts instead of reduced ones; takes minutes"
    )
    parser.addoption(
        "--spark", action="store_true", help="only the tests with Spark; fails where they cannot run"
    )
    parser.addoption(
        "--first-seed",
        type=int,
        default=secrets.randbelow(1 << 32),
        help="the first chaos seed that is tried; by default a random one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile; `--hypothesis-profile` on the command line takes precedence."""
    settings.load_profile("full" if config.getoption("--full") else "normal")
    config.addinivalue_line("markers", "alone: judges time; runs while no other test does")
    config.addinivalue_line("markers", "spark: starts Spark, so it runs only where there is Java")
    if config.getoption("--spark") and (missing := find_missing()) is not None:
        raise pytest.UsageError(missing)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests with Spark first, as they take longest, and exclusive tests last, as other tests wait for
    them.
    """
    with_spark = [item for item in items if item.get_closest_marker("spark") is not None]
    if config.getoption("--spark"):
        items[:] = with_spark
        return
    missing = find_missing() if with_spark else None
    if missing is not None:
        for item in with_spark:
            item.add_marker(pytest.mark.skip(reason=missing))
    items.sort(key=lambda item: (_runs_exclusively(item), SPARK not in item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores, up to 8, since many tests wait for other processes."""
    return min((os.cpu_count() or 1) + 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give all tests with Spark to one worker, and every other test to any free worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if SPARK in nodeid else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of tests, the number of Spark tests that did not run, and how to enable them."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == PRINTED and report.when == "call":
                terminalreporter.write_line(value)
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("spark" in getattr(report, "keywords", ()) for report in skipped)
    if count and (missing := find_missing()) is not None:
        terminalreporter.write_line(f"{count} tests with Spark did not run: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that measures time while no other test runs."""
    with hold_machine(exclusive=_runs_exclusively(item)):
        return (yield)


def _runs_exclusively(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.fixture
def print_at_end(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """A function that prints a line at the end of the run."""
    return partial(record_property, PRINTED)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """True if this run uses the full amounts."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark session, started once for all tests that request it; these tests are marked `spark`."""
    from delta_prop.spark.data_source.sessions import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Spark's own code warns on newer versions of Python
        spark_session = session("tests")
        yield spark_session
        spark_session.stop()
