"""A server in a process of its own, as operators run it, with its CPU time, memory and open files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

END_S_MAX = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Served:
    """A running server process."""

    process: subprocess.Popen[str]
    port: int
    http_port: int

    def cpu_s(self) -> float:
        """Return the CPU time so far, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def loop_cpu_s(self) -> float:
        """Return the CPU time of the first thread, which runs the event loop; exact while it sleeps."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024

    def open_file_count(self) -> int:
        """Return the number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(
    data: Path, *options: str, env: Mapping[str, str] | None = None, errors: Path | None = None, port: int = 0
) -> Iterator[Served]:
    """Run `delta-prop serve`, ended by SIGTERM. `errors`: the file for its log."""
    command = [sys.executable, "-m", "delta_prop", "serve", "--data", str(data), "--port", str(port)]
    with open(errors or os.devnull, "a") as log:
        process = subprocess.Popen(
            [*command, "--http-port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(env or {})},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), f"{line!r}; exit status {process.poll()}"
        ports = dict(part.split("=") for part in line.split()[1:])
        yield Served(process, int(ports["port"]), int(ports["http"]))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
