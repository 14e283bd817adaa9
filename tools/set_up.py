"""Installs a lock file into .venv; ./run calls it when the environment's stamp is out of date.

The stamp is written last, so a set-up that failed or was stopped starts over. Only one set-up runs at a time.
This module uses the standard library only, as it runs before anything is installed.
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
VENV_FIX = "sudo apt-get install -y python3-venv"
NAMES = ("python3.13", "python3.12", "python3.11", "python3", "python")
"""Names of Python interpreters on the PATH."""
PROBES, PROBE_S_MAX = 10, 20.0
NO_CORE = (
    "no native core ({reason}): its twin in Python runs, with up to 5 times the CPU for batches of 100 and "
    "9 times for lone deltas; install Rust (rustup.rs), then remove .venv/stamp-core"
)
"""The line for a machine that cannot build the native core."""
QUICKER_MIN = 1.2
"""Another interpreter is chosen if it is this many times as quick as the running one."""
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
    total, known = 0, {}
    for number in range(10000):
        known["last"] = Made(number)
        total += known["last"].more(total & 7) + len([number, str(number)])
taken = []
for _ in range(5):
    began = time.process_time()
    work()
    taken.append(time.process_time() - began)
print(min(taken), os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
"""
"""Program that checks that a Python can make an environment, and measures its speed."""


class SetUpError(Exception):
    """The set-up cannot continue; the text gives the reason, and the fix if it is known."""


def main(root: Path, expected_stamp: str, addition: str = "") -> int:
    """Bring root/.venv in line with the stamp `expected_stamp`. Return the exit status.

    `addition`: the name of a further lock, installed into the existing environment, or `core`.
    """
    try:
        with hold_lock(root / ".venv.lock") as lock:
            stamp = root / ".venv" / (f"stamp-{addition}" if addition else "stamp")
            if not stamp.is_file() or stamp.read_text() != expected_stamp:
                set_up = SetUp(root, lock)
                if addition == "core":
                    set_up.build_core(expected_stamp)
                elif addition:
                    set_up.add(addition, expected_stamp)
                else:
                    set_up.run(expected_stamp)
    except SetUpError as failure:
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
def hold_lock(path: Path, wait_s_max: float = WAIT_S_MAX) -> Iterator[IO[str]]:
    """Hold the lock file: the system releases it when its last holder ends, even by a crash."""
    deadline = time.monotonic() + wait_s_max
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetUpError(
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

    def run(self, expected_stamp: str) -> None:
        """Create or repair the environment, then stamp it."""
        stamp = self._env / "stamp"
        in_place = stamp.exists() and self._can_be_repaired(stamp.read_text())
        stamp.unlink(missing_ok=True)
        self._log.write_text("")
        self._progress.announce(f"{len(locked_blocks(self._requirements.read_text()))} packages")
        uv = shutil.which("uv")
        if not (uv and self._install_with_uv(uv, in_place)):
            self._install_with_pip(in_place)
        partial = self._env / "stamp.partial"
        partial.write_text(expected_stamp)
        partial.rename(stamp)
        self._progress.end()

    def add(self, addition: str, expected_stamp: str) -> None:
        """Install the packages of a further lock into the existing environment."""
        requirements = self._root / f"requirements-{addition}.lock"
        names = locked_blocks(requirements.read_text())
        summary = f"{len(names)} packages for {addition}"
        self._progress.announce(summary)
        self._progress.say(f"installing {summary}")
        last = ["--no-deps", "--require-hashes", "--no-build-isolation", "-r", str(requirements)]
        uv = shutil.which("uv")
        try:
            if uv is None:
                raise SetUpError("uv is not installed")
            self._call([uv, "pip", "install", "--python", str(self._python), *last], uv_environ(os.environ))
        except SetUpError:
            pip = [str(self._python), "-m", "pip", "install", "--no-input", "--use-pep517"]
            self._call([*pip, *last], pip_environ(os.environ))
        (self._env / f"stamp-{addition}").write_text(expected_stamp)
        self._progress.end()

    def build_core(self, expected_stamp: str) -> None:
        """Build the native core into the environment; where that fails, say that its twin runs, and why."""
        native = self._root / "native"
        program = "import sysconfig; print(sysconfig.get_path('platlib'))"
        folder = subprocess.run([self._python, "-c", program], capture_output=True, text=True, check=True)
        installed = Path(folder.stdout.strip()) / "delta_prop_core.abi3.so"
        installed.unlink(missing_ok=True)
        self._log.write_text("")
        try:
            cargo = shutil.which("cargo")
            if cargo is None:
                raise SetUpError("cargo is not installed")
            if not self._progress.is_shown:
                print(
                    "./run: building the native core, which takes a minute or so", file=sys.stderr, flush=True
                )
            self._progress.say("building the native core")
            build = [cargo, "build", "--release", "--locked", "--features", "python"]
            environ = {
                **os.environ,
                "PYO3_PYTHON": str(self._python),
                "CARGO_TARGET_DIR": str(native / "target"),
            }
            self._call([*build, "--manifest-path", str(native / "Cargo.toml")], environ)
            (built,) = (
                path
                for path in (native / "target" / "release").glob("libdelta_prop_core.*")
                if path.suffix in (".so", ".dylib")
            )
            partial = installed.with_name("delta_prop_core.partial")
            shutil.copy(built, partial)
            partial.rename(installed)
        except (SetUpError, OSError, ValueError) as failure:
            self._progress.end()
            reason = str(failure).split(" (full log", maxsplit=1)[0]
            print(f"./run: {NO_CORE.format(reason=reason)}", file=sys.stderr, flush=True)
        (self._env / "stamp-core").write_text(expected_stamp)
        self._progress.end()

    def _can_be_repaired(self, stamp: str) -> bool:
        """Return True if the environment was made here, works, and has only packages that the locks name."""
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
        known = {name for lock in locks for name in locked_blocks(lock.read_text())} | {"pip", "delta-prop"}
        return found.returncode == 0 and {canonical_name(name) for name in found.stdout.split()} <= known

    def _install_with_uv(self, uv: str, in_place: bool) -> bool:
        """Return False if uv fails: pip may have registry settings that uv does not read."""
        environ = uv_environ(os.environ)
        try:
            if not in_place:
                self._remove()
                self._call([uv, "venv", "--python", self._interpreter(), str(self._env)], environ)
            install = [uv, "pip", "install", "--python", str(self._python), "--compile-bytecode"]
            self._install(install, environ)
        except SetUpError:
            return False
        return True

    def _install_with_pip(self, in_place: bool) -> None:
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
            raise SetUpError(f"this Python has no ensurepip and no pip; this brings them: {VENV_FIX}")

    def _install(self, install: Sequence[str], environ: Mapping[str, str]) -> None:
        """Install the build tools of source packages, then the lock, then the checkout itself, editable.

        No build is isolated: an isolated build would fetch unlocked build tools.
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
        """Return the Python to make the environment with."""
        if not self._chosen:
            self._progress.say("looking for the quickest Python")
            self._chosen = quickest_python(interpreter_path(), os.environ)
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
        """Run one step. It inherits the lock file, so the lock is held until the step ends."""
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
            raise SetUpError(
                f"{failure_reason(self._log.read_text())} (full log: {self._log}); check the network and the "
                "registry that pip or uv is configured to use, then start again"
            )


class Progress:
    """A progress line that is rewritten on a terminal; elsewhere one line at the start."""

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()
        self._start = time.monotonic()
        self._what = ""

    def announce(self, what: str) -> None:
        """Print the one line, if standard error is not a terminal."""
        if not self.is_shown:
            text = f"./run: installing {what} into .venv, which takes a minute or so"
            print(text, file=sys.stderr, flush=True)

    def say(self, what: str) -> None:
        """Show the name of the step that starts now."""
        self._what = what
        self.tick()

    def tick(self) -> None:
        """Show the step and the seconds since the start."""
        self._write(f"first start: {self._what}, {time.monotonic() - self._start:.0f} s")

    def end(self) -> None:
        """Clear the line."""
        self._write("")

    def _write(self, text: str) -> None:
        if self.is_shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def locked_blocks(text: str) -> dict[str, str]:
    """Return each package of a lock file: its canonical name, and its lines with their hashes."""
    blocks: dict[str, str] = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        if pinned := re.match(r"([A-Za-z0-9._-]+)==", block):
            name = canonical_name(pinned[1])
            blocks[name] = blocks.get(name, "") + block
    return blocks


def canonical_name(name: str) -> str:
    """Return the normalized spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def interpreter_path() -> str:
    """Return the path of this Python's version: once it is removed, the environment is made again."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def quickest_python(own: str, environ: Mapping[str, str]) -> str:
    """Return a Python on the PATH that is clearly quicker than this one, else this one.

    If PYTHON is set, it names this one, which is then returned.
    A Python built without profile-guided optimization, as version managers do, takes up to twice as long.
    """
    if environ.get("PYTHON"):
        return own
    folders = dict.fromkeys(
        Path(folder).resolve() for folder in environ.get("PATH", "").split(os.pathsep) if folder
    )
    found: dict[str, float] = {}
    for python in (own, *(str(folder / name) for folder in folders for name in NAMES)):
        taken_s, path = probe(python)
        if path:
            found.setdefault(path, taken_s)
    for _ in range(PROBES if len(found) > 1 else 0):  # interleaved, as the machine's speed varies
        found = {path: min(taken_s, probe(path)[0]) for path, taken_s in found.items()}
    best = min(found, key=found.__getitem__, default=own)
    return best if own not in found or found[own] >= QUICKER_MIN * found[best] else own


def probe(python: str) -> tuple[float, str]:
    """Return the seconds of a short loop in a Python, and the path of its version; no path if unusable."""
    try:
        result = subprocess.run(
            [python, "-I", "-c", PROBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_S_MAX,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return math.inf, ""
    taken_s, _, path = result.stdout.strip().partition(" ")
    return float(taken_s), path


def pip_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the user's pip settings, except the target, which is always this .venv."""
    removed = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME"}
    known = {name: value for name, value in environ.items() if name not in removed}
    return {**known, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with pip's registry settings for uv, which does not read them itself."""
    settings = {
        "UV_INDEX_URL": environ.get("PIP_INDEX_URL", ""),
        "UV_EXTRA_INDEX_URL": environ.get("PIP_EXTRA_INDEX_URL", ""),
        "UV_FIND_LINKS": ",".join(existing_links(environ.get("PIP_FIND_LINKS", ""))),
        "UV_NO_INDEX": environ.get("PIP_NO_INDEX", ""),
        "SSL_CERT_FILE": environ.get("PIP_CERT", ""),
    }
    return {**{name: value for name, value in settings.items() if value}, **pip_environ(environ)}


def existing_links(links: str) -> list[str]:
    """Return the URLs and existing folders of wheels; pip skips a missing folder, uv would fail."""
    return [link for link in links.split() if "://" in link or Path(link).is_dir()]


def failure_reason(log: str) -> str:
    """Return the line of the log that describes a failure best."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)error|.*\bno matching distribution|.*hash", line)]
    return (errors or lines or ["the set-up failed"])[-1]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
