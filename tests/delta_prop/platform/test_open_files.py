"""A server may open as many files as the system allows its process, not only those of the first limit."""

from __future__ import annotations

import subprocess
import sys

LOWER_AND_RAISE = """
import resource
from delta_prop.platform.system import OPEN_FILES_MAX, raise_open_files_limit
hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], {hard})
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raised = raise_open_files_limit()
print(raised == min(hard, OPEN_FILES_MAX), raised == raise_open_files_limit())
"""


def test_limit_of_open_files_is_raised_up_to_that_of_the_system() -> None:
    for hard in (1_000, 1 << 20):
        code = LOWER_AND_RAISE.format(hard=hard)
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert finished.stdout.split() == ["True", "True"]
