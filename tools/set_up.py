"""Fills .venv from a lock; ./run calls it when the environment's stamp is not the one it wants.

The stamp is written last, so a set-up that failed or was stopped starts anew. One runs at a time.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WAIT_S_MAX = 900.0
VENV_CURE = "sudo apt-get install -y python3-venv"
NAMES = ("python3.13", "python3.12", "python3.11", "python3", "python")
"""What a Python is called on the PATH."""
PROBES, PROBE_S_MAX = 10, 20.0
QUICKER_MIN = 1.2
"""Another one is taken where it is so many times as quick as the one that was found first."""
PROBE = """
import os, sys, time
assert sys.version_info >= (3, 11)
import sqlite3, ssl, venv
try: import ensurepip
except ImportError: import pip
class Made:
    def __init__(self, number): self.number = number
    def more(self, by): return self.number + by
def work():
    total, kept = 0, {}
    for number in range(10000):
        kept["last"] = Made(number)
        total += kept["last"].more(total & 7) + len([number, str(number)])
taken = []
for _ in range(5):
    began = time.process_time()
    work()
    taken.append(time.process_time() - began)
print(min(taken), os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
"""
"""What an environment needs of a Python, and how quick it is."""


class Failed(Exception):
    """The set-up cannot go on; the text says why, and what cures it where that is known."""


def main(root: Path, want: str, addition: str = "") -> int:
    """Bring root/.venv in line with the recipe `want`. Returns the exit status.

    `addition`: what is added to an environment that is there, from the lock of that name.
    """
    try:
        with alone(root / ".venv.lock") as lock:
            stamp = root / ".venv" / (f"stamp-{addition}" if addition else "stamp")
            if not stamp.is_file() or stamp.read_text() != want:
                set_up = SetUp(root, lock)
                set_up.add(addition, want) if addition else set_up.run(want)
    except Failed as failure:
        print(f"\n./run: {failure}" if sys.stderr.isatty() else f"./run: {failure}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"./run: {root} cannot be written ({error}): clone it to a folder of your own", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n./run: stopped; the next start sets up again", file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def alone(path: Path, wait_s_max: float = WAIT_S_MAX) -> Iterator[IO[str]]:
    """Hold the lock file: the system lets go of it when its last holder dies, however it dies."""
    deadline = time.monotonic() + wait_s_max
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Failed(
                        f"another set-up of this checkout has held {path} for {wait_s_max:.0f} s; "
                        "end that one, then start again"
                    ) from None
                time.sleep(0.1)
        yield file


class SetUp:
    """One set-up of one checkout. The packages come with uv where it works, else with pip."""

    def __init__(self, root: Path, lock: IO[str]) -> None:
        self._root = root
        self._lock = lock
        self._env = root / ".venv"
        self._python = self._env / "bin" / "python"
        self._requirements = root / "requirements.lock"
        self._log = root / ".venv.log"
        self._progress = Progress()
        self._chosen = ""

    def run(self, want: str) -> None:
        """Make or mend the environment, then stamp it."""
        stamp = self._env / "stamp"
        in_place = stamp.exists() and self._may_be_mended(stamp.read_text())
        stamp.unlink(missing_ok=True)
        self._log.write_text("")
        self._progress.announce(f"{len(locked_blocks(self._requirements.read_text()))} packages")
        uv = shutil.which("uv")
        if not (uv and self._with_uv(uv, in_place)):
            self._with_pip(in_place)
        partial = self._env / "stamp.partial"
        partial.write_text(want)
        partial.rename(stamp)
        self._progress.end()

    def add(self, addition: str, want: str) -> None:
        """Install a further lock's packages, which are all that it needs beside those that are there."""
        requirements = self._root / f"requirements-{addition}.lock"
        names = locked_blocks(requirements.read_text())
        what = f"{len(names)} packages for {addition}"
        self._progress.announce(what)
        self._progress.say(f"installing {what}")
        last = ["--no-deps", "--require-hashes", "--no-build-isolation", "-r", str(requirements)]
        uv = shutil.which("uv")
        try:
            if uv is None:
                raise Failed("uv is not there")
            self._call([uv, "pip", "install", "--python", str(self._python), *last], uv_environ(os.environ))
        except Failed:
            pip = [str(self._python), "-m", "pip", "install", "--no-input", "--use-pep517"]
            self._call([*pip, *last], pip_environ(os.environ))
        (self._env / f"stamp-{addition}").write_text(want)
        self._progress.end()

    def _may_be_mended(self, stamp: str) -> bool:
        """Whether the environment was made here, works, and holds nothing that the lock does not name."""
        if stamp.splitlines()[1:] != [str(self._root)]:
            return False
        names = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
        try:
            found = subprocess.run(
                [self._python, "-I", "-c", names], capture_output=True, text=True, check=False
            )
        except OSError:
            return False
        locks = (self._requirements, *self._root.glob("requirements-*.lock"))
        kept = {name for lock in locks for name in locked_blocks(lock.read_text())} | {"pip", "delta-prop"}
        return found.returncode == 0 and {canonical(name) for name in found.stdout.split()} <= kept

    def _with_uv(self, uv: str, in_place: bool) -> bool:
        """False where uv cannot do it here: pip may know the registry by settings that uv does not read."""
        environ = uv_environ(os.environ)
        try:
            if not in_place:
                self._remove()
                self._call([uv, "venv", "--python", self._interpreter(), str(self._env)], environ)
            install = [uv, "pip", "install", "--python", str(self._python), "--compile-bytecode"]
            self._install(install, environ)
        except Failed:
            return False
        return True

    def _with_pip(self, in_place: bool) -> None:
        environ = pip_environ(os.environ)
        own = [str(self._python), "-m", "pip"]
        if in_place and self._works([*own, "--version"]):
            self._install([*own, "install", "--no-input"], environ)
            return
        self._remove()
        python = self._interpreter()
        if self._works([python, "-c", "import ensurepip, venv"]):
            self._call([python, "-m", "venv", str(self._env)], environ)
            self._install([*own, "install", "--no-input"], environ)
        elif self._works([python, "-c", "import pip, venv"]):
            self._call([python, "-m", "venv", "--without-pip", str(self._env)], environ)
            outer = [python, "-m", "pip", "--python", str(self._python)]
            self._install([*outer, "install", "--no-input"], environ)
        else:
            raise Failed(f"this Python has no ensurepip and no pip; this brings them: {VENV_CURE}")

    def _install(self, install: Sequence[str], environ: Mapping[str, str]) -> None:
        """The lock first, with what builds source packages ahead of them, then the checkout itself, editable.

        Nothing is built in isolation: an isolated build would fetch unlocked build tools.
        """
        blocks = locked_blocks(self._requirements.read_text())
        builders = self._env / "builders.txt"
        builders.write_text(blocks["setuptools"])
        self._progress.say(f"installing {len(blocks)} packages")
        hashed = [*install, "--require-hashes", "--no-build-isolation"]
        if "uv" not in Path(install[0]).name:
            hashed.append("--use-pep517")
        self._call([*hashed, "-r", str(builders)], environ)
        self._call([*hashed, "-r", str(self._requirements)], environ)
        self._call([*install, "--no-deps", "--no-build-isolation", "-e", str(self._root)], environ)

    def _interpreter(self) -> str:
        """The Python whose environment this will be."""
        if not self._chosen:
            self._progress.say("looking for the quickest Python")
            self._chosen = quickest(interpreter(), os.environ)
        return self._chosen

    def _remove(self) -> None:
        self._progress.say("making .venv")
        if self._env.is_symlink() or self._env.is_file():
            self._env.unlink()
        elif self._env.exists():
            shutil.rmtree(self._env)

    def _works(self, command: Sequence[str]) -> bool:
        return (
            subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode
            == 0
        )

    def _call(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run one step. It inherits the lock, which so outlasts this process for as long as the step runs."""
        with self._log.open("a") as log:
            print("$", *command, file=log, flush=True)
            step = subprocess.Popen(
                command,
                cwd=self._root,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._lock.fileno(),),
            )
            try:
                while True:
                    try:
                        status = step.wait(0.2)
                        break
                    except subprocess.TimeoutExpired:
                        self._progress.tick()
            except BaseException:
                step.kill()
                step.wait()
                raise
        if status != 0:
            raise Failed(
                f"{why(self._log.read_text())} (all of it: {self._log}); check the network and the registry "
                "that pip or uv is told to use, then start again"
            )


class Progress:
    """One line that rewrites itself on a terminal; elsewhere one line when it begins."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._start = time.monotonic()
        self._what = ""

    def announce(self, what: str) -> None:
        """Say elsewhere, before anything is installed, what will be."""
        if not self._shown:
            text = f"./run: installing {what} into .venv, which takes a minute or so"
            print(text, file=sys.stderr, flush=True)

    def say(self, what: str) -> None:
        """Name the step that runs from now on."""
        self._what = what
        self.tick()

    def tick(self) -> None:
        """Show the step and the seconds since the start."""
        self._write(f"first start: {self._what}, {time.monotonic() - self._start:.0f} s")

    def end(self) -> None:
        """Leave the line empty."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def locked_blocks(text: str) -> dict[str, str]:
    """Each package of a lock file: its canonical name, and its lines with their hashes."""
    blocks: dict[str, str] = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        if pinned := re.match(r"([A-Za-z0-9._-]+)==", block):
            name = canonical(pinned[1])
            blocks[name] = blocks.get(name, "") + block
    return blocks


def canonical(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def interpreter() -> str:
    """This Python by the path of its version: once that is gone, the environment is made anew."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def quickest(own: str, environ: Mapping[str, str]) -> str:
    """Of the Pythons on the PATH one that is clearly quicker than this one, else this one, as where PYTHON is
    set: that names it.

    One that was built without the compiler's profiles, as version managers do, takes up to twice as long.
    """
    if environ.get("PYTHON"):
        return own
    folders = dict.fromkeys(
        Path(folder).resolve() for folder in environ.get("PATH", "").split(os.pathsep) if folder
    )
    found: dict[str, float] = {}
    for python in (own, *(str(folder / name) for folder in folders for name in NAMES)):
        taken_s, path = probed(python)
        if path:
            found.setdefault(path, taken_s)
    for _ in range(PROBES if len(found) > 1 else 0):  # in turn, as the machine is slower now and then
        found = {path: min(taken_s, probed(path)[0]) for path, taken_s in found.items()}
    best = min(found, key=found.__getitem__, default=own)
    return best if own not in found or found[own] >= QUICKER_MIN * found[best] else own


def probed(python: str) -> tuple[float, str]:
    """How long a short loop takes there, in seconds, and the path of its version: none where it is no use."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PROBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_S_MAX,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return math.inf, ""
    taken_s, _, path = done.stdout.strip().partition(" ")
    return float(taken_s), path


def pip_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What the user told pip stays, except where it would install: that is always this .venv."""
    elsewhere = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME"}
    kept = {name: value for name, value in environ.items() if name not in elsewhere}
    return {**kept, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """uv does not read pip's settings: where it has none of its own, it is told pip's registry."""
    told = {
        "UV_INDEX_URL": environ.get("PIP_INDEX_URL", ""),
        "UV_EXTRA_INDEX_URL": environ.get("PIP_EXTRA_INDEX_URL", ""),
        "UV_FIND_LINKS": ",".join(existing_links(environ.get("PIP_FIND_LINKS", ""))),
        "UV_NO_INDEX": environ.get("PIP_NO_INDEX", ""),
        "SSL_CERT_FILE": environ.get("PIP_CERT", ""),
    }
    return {**{name: value for name, value in told.items() if value}, **pip_environ(environ)}


def existing_links(links: str) -> list[str]:
    """Places to look for wheels; pip passes over a folder that is not there, uv would stop."""
    return [link for link in links.split() if "://" in link or Path(link).is_dir()]


def why(log: str) -> str:
    """The line of the log that says most about a failure."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)error|.*\bno matching distribution|.*hash", line)]
    return (errors or lines or ["the set-up failed"])[-1]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
