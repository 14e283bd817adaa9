"""What every test shares: the `--full` amounts and the profiles of hypothesis.

A normal run is the same every time, on every machine; `--full` draws new examples, in full amounts.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether this run uses the full amounts."""
    return bool(pytestconfig.getoption("--full"))
