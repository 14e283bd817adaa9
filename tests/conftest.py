"""What every test shares: the `--full` amounts and the profiles of hypothesis.

A normal run is the same every time, on every machine; `--full` draws new examples, in full amounts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.quiet import in_the_room

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile(
    "normal",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", max_examples=1_000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full`."""
    parser.addoption(
        "--full", action="store_true", help="the full amounts instead of shrunk ones; takes minutes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile; `--hypothesis-profile` on the command line still wins."""
    settings.load_profile("full" if config.getoption("--full") else "normal")
    config.addinivalue_line("markers", "alone: judges time; runs while no other test does")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep the machine quiet for the tests that judge time."""
    with in_the_room(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether this run uses the full amounts."""
    return bool(pytestconfig.getoption("--full"))
