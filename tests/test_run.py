"""./run and tools/set_up.py: one set-up, a quick second start, and errors of one line that name the fix.

The script runs in a copy of the checkout with a stand-in for Python, so nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import set_up

ROOT = Path(__file__).parents[1]
LOCKS = {name: (ROOT / name).read_text() for name in ("requirements.lock", "requirements-spark.lock")}

STAND_IN = """#!/bin/sh
# Acts as a newly installed Python: succeeds if asked for its version, and "sets up" by writing the stamp.
[ "$1" = -c ] && exit 0
echo set-up >> "$HERE/calls"
[ ! -e "$HERE/broken" ] || exit 1
[ -z "$5" ] || { echo "$5" >> "$HERE/additions"; printf '%s' "$4" > "$3/.venv/stamp-$5"; exit; }
mkdir -p "$3/.venv/bin"
printf '#!/bin/sh\\necho "ran $*"\\n' > "$3/.venv/bin/python"
chmod +x "$3/.venv/bin/python"
printf '%s' "$4" > "$3/.venv/stamp"
"""


class Checkout:
    """A copy of the files that ./run reads, with a folder of commands as its only PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.commands = folder / "commands"
        self.root.mkdir()
        self.commands.mkdir()
        (self.root / "tools").mkdir()
        for name in ("run", *LOCKS, "pyproject.toml", "tools/set_up.py"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("sh", "cat", "cksum", "dirname", "mkdir", "sed", "uname", "chmod"):
            path = shutil.which(name)
            assert path is not None
            (self.commands / name).symlink_to(path)

    def add_command(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ./run with these arguments."""
        environ = {"PATH": str(self.commands), "HERE": str(self.root)}
        return subprocess.run(
            [self.root / "run", *arguments], env=environ, capture_output=True, text=True, check=False
        )

    @property
    def set_ups(self) -> int:
        """Return the number of set-ups started."""
        calls = self.root / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.add_command("python3", STAND_IN)
    return checkout


def test_run_sets_up_once_and_prints_nothing_itself(checkout: Checkout) -> None:
    for _ in range(2):
        completed = checkout.run("python", "a", "b c")
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "ran a b c\n", "")
    assert checkout.set_ups == 1


@pytest.mark.parametrize("name", ["requirements.lock", "tools/set_up.py"])
def test_changed_set_up_file_causes_new_set_up(checkout: Checkout, name: str) -> None:
    checkout.run("python")
    with (checkout.root / name).open("a") as file:
        file.write("# another\n")
    assert checkout.run("python").returncode == 0
    assert checkout.set_ups == 2


def test_only_changed_dependencies_cause_new_set_up(checkout: Checkout) -> None:
    checkout.run("python")
    project = checkout.root / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 110", "line-length = 100"))
    checkout.run("python")
    assert checkout.set_ups == 1
    project.write_text(project.read_text().replace('"anyio>=4.8"', '"anyio>=4.9"'))
    checkout.run("python")
    assert checkout.set_ups == 2


def test_moved_checkout_causes_new_set_up(checkout: Checkout) -> None:
    checkout.run("python")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run("python").returncode == 0
    assert checkout.set_ups == 2


def test_failed_set_up_is_retried(checkout: Checkout) -> None:
    (checkout.root / "broken").touch()
    assert checkout.run("python").returncode == 1
    (checkout.root / "broken").unlink()
    assert checkout.run("python").returncode == 0
    assert checkout.set_ups == 2


@pytest.mark.parametrize("seed_arguments", [["x"], ["-1"], [""], [], ["1.5"]])
def test_invalid_first_seed_is_reported_before_installing(
    checkout: Checkout, seed_arguments: list[str]
) -> None:
    completed = checkout.run("test", "tests/wire", "--first-seed", *seed_arguments)
    assert (completed.returncode, completed.stdout, checkout.set_ups) == (2, "", 0)
    assert completed.stderr.count("\n") == 1
    assert "give a whole number" in completed.stderr
    assert checkout.run("test", f"--first-seed={seed_arguments[0] if seed_arguments else ''}").returncode == 2
    assert checkout.run("test", "--first-seed", "17", "-x").returncode == 0


@pytest.mark.parametrize(
    ("release", "spark_set_ups"), [("17.0.15", 1), ("21", 1), ("11.0.2", 0), ("1.8.0_392", 0)]
)
def test_spark_is_installed_once_for_tests_if_java_suits(
    checkout: Checkout, release: str, spark_set_ups: int
) -> None:
    version = f"#!/bin/sh\necho 'openjdk version \"{release}\" 2025-04-15' >&2\n"
    checkout.add_command("java", version)
    for verb in ("python", "test", "bench"):
        assert checkout.run(verb).returncode == 0
    assert checkout.set_ups == 1 + spark_set_ups
    assert (checkout.root / "additions").exists() == bool(spark_set_ups)


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "--help"], ["bench", "spark", "-h"], ["test", "--help"]]
)
def test_help_installs_no_spark(checkout: Checkout, arguments: list[str]) -> None:
    checkout.add_command("java", "#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    assert checkout.run(*arguments).returncode == 0
    assert checkout.set_ups == 1
    assert checkout.run("bench", "mix").returncode == 0
    assert checkout.set_ups == 2


def test_failed_spark_install_is_reported_and_tests_run(checkout: Checkout) -> None:
    checkout.add_command("java", "#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    checkout.run("python")
    (checkout.root / "broken").touch()
    completed = checkout.run("test", "x")
    assert (completed.returncode, completed.stderr) == (0, "./run: continuing without Spark\n")
    assert completed.stdout == "ran -m pytest -n auto x\n"


@pytest.mark.parametrize(
    ("system", "managers", "too_old", "fix"),
    [
        ("Linux", ["apt-get"], False, "sudo apt-get install -y python3 python3-venv"),
        ("Linux", ["apt-get"], True, "curl -LsSf https://astral.sh/uv/install.sh | sh"),
        ("Linux", ["dnf"], True, "sudo dnf install -y python3.12"),
        ("Linux", ["apk"], False, "sudo apk add python3"),
        ("Linux", [], False, "curl -LsSf https://astral.sh/uv/install.sh | sh"),
        ("Darwin", ["brew"], True, "brew install python@3.12"),
        ("Darwin", [], True, "curl -LsSf https://astral.sh/uv/install.sh | sh"),
    ],
)
def test_missing_python_is_reported_with_one_line_fix(
    tmp_path: Path, system: str, managers: list[str], too_old: bool, fix: str
) -> None:
    checkout = Checkout(tmp_path)
    (checkout.commands / "uname").unlink()
    checkout.add_command("uname", f"#!/bin/sh\necho {system}\n")
    for name in managers + ["python3"] * too_old:
        checkout.add_command(name, "#!/bin/sh\nexit 1\n")
    completed = checkout.run("demo")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == f"./run: Python >= 3.11: not found: install it with: {fix}\n"


def test_help_names_every_verb_and_unknown_verb_is_refused(checkout: Checkout) -> None:
    verbs = re.findall(r"(?m)^    ([a-z-]+)\)", (ROOT / "run").read_text())
    assert {"demo", "test", "check", "bench", "delta-prop"} <= set(verbs)
    shown = checkout.run("help").stdout
    assert all(f"\n  {verb} " in shown for verb in verbs)
    completed = checkout.run("frobnicate")
    assert (completed.returncode, completed.stderr) == (
        2,
        "./run: verb 'frobnicate': unknown: see ./run help\n",
    )
    assert checkout.set_ups == 0


def test_unknown_benchmark_error_lists_known_ones() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 2
    assert re.fullmatch(r"\./run bench: no benchmark 'nothing'; there are: [a-z0-9_, ]+\n", completed.stderr)


def test_ci_runs_all_parts_and_fails_with_any(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    script = tmp_path / "run"
    for failing, expected in (("check", 1), ("test", 1), ("fuzz", 1), ("none", 0)):
        script.write_text(f'#!/bin/sh\necho "$1"\n[ "$1" != {failing} ]\n')
        script.chmod(0o755)
        completed = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, check=False)
        assert (completed.returncode, completed.stdout) == (expected, "check\ntest\nfuzz\n")


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_no_registry_and_hashes_everything(name: str) -> None:
    assert re.search(r"://|--(extra-)?index|--find-links|\.(org|com|net|io)\b", LOCKS[name]) is None
    blocks = set_up.locked_blocks(LOCKS[name])
    assert blocks
    assert all("--hash=sha256:" in block for block in blocks.values())


def test_spark_lock_shares_no_package_with_base_lock() -> None:
    base, spark = (set(set_up.locked_blocks(text)) for text in LOCKS.values())
    assert "pyspark" in spark
    assert not base & spark


def test_locks_satisfy_project_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()]
    requirements = [*project["project"]["dependencies"], *(line for group in groups for line in group)]
    blocks = set_up.locked_blocks("".join(LOCKS.values()))
    for requirement in (Requirement(line) for line in requirements if isinstance(line, str)):
        if requirement.name == "delta-prop-core":  # ./run builds it from the checkout
            continue
        versions = re.findall(r"(?m)^[\w.-]+==(\S+)", blocks[canonicalize_name(requirement.name)])
        assert versions
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_concurrent_set_up_fails_at_its_deadline(tmp_path: Path) -> None:
    lock, deadline_error = tmp_path / "lock", pytest.raises(set_up.SetUpError, match=r"has held \S+ for 0 s")
    with set_up.hold_lock(lock), deadline_error, set_up.hold_lock(lock, 0.0):
        pass
    with set_up.hold_lock(lock, 0.0):
        pass


def test_finished_set_up_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "stamp").write_text("the recipe")
    assert set_up.main(tmp_path, "the recipe") == 0
    assert sorted(path.name for path in (tmp_path / ".venv").iterdir()) == ["stamp"]


def test_failed_set_up_leaves_no_stamp_and_reports_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "stamp").write_text("an older recipe")
    monkeypatch.setattr(set_up, "interpreter_path", lambda: "/bin/false")
    monkeypatch.setenv("PATH", "")
    assert set_up.main(tmp_path, "the recipe") == 1
    assert not (tmp_path / ".venv" / "stamp").exists()
    first, reason = capsys.readouterr().err.splitlines(keepends=True)
    assert re.fullmatch(r"\./run: installing [0-9]+ packages into \.venv, which takes a minute .*\n", first)
    assert reason.startswith("./run: this Python has no ensurepip")
    assert reason.endswith("sudo apt-get install -y python3-venv\n")


def test_failed_update_in_place_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "stamp").write_text(f"an older recipe\n{tmp_path}")
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / "requirements.lock").write_text("setuptools==1 --hash=sha256:00\n")
    steps: list[list[str]] = []

    def fail(self: set_up.SetUp, command: list[str], environ: dict[str, str]) -> None:
        steps.append(command)
        raise set_up.SetUpError("the network is down")

    monkeypatch.setattr(set_up.SetUp, "_call", fail)
    monkeypatch.setenv("PATH", "")
    assert set_up.main(tmp_path, "the recipe") == 1
    assert [step[1:4] for step in steps] == [["-m", "pip", "install"]]
    assert not (tmp_path / ".venv" / "stamp").exists()


def test_adding_spark_is_reported_before_installing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv").mkdir()
    lock = "pyspark==4 --hash=sha256:00\npy4j==1 --hash=sha256:00\n"
    (tmp_path / "requirements-spark.lock").write_text(lock)
    printed: list[str] = []
    monkeypatch.setattr(set_up.SetUp, "_call", lambda *_: printed.append(capsys.readouterr().err))
    assert set_up.main(tmp_path, "the recipe", "spark") == 0
    assert printed == ["./run: installing 2 packages for spark into .venv, which takes a minute or so\n"]


def test_registry_named_by_user_is_used(tmp_path: Path) -> None:
    environ = {
        "PIP_INDEX_URL": "file:///mirror",
        "PIP_FIND_LINKS": f"{tmp_path} {tmp_path / 'gone'} file:///wheels",
        "PIP_TARGET": "/elsewhere",
        "PYTHONPATH": "/elsewhere",
    }
    for_pip = set_up.pip_environ(environ)
    assert {for_pip["PIP_INDEX_URL"], for_pip["PIP_FIND_LINKS"]} == {
        environ["PIP_INDEX_URL"],
        environ["PIP_FIND_LINKS"],
    }
    assert not {"PIP_TARGET", "PYTHONPATH"} & set(for_pip)
    for_uv = set_up.uv_environ(environ)
    assert for_uv["UV_INDEX_URL"] == "file:///mirror"
    assert for_uv["UV_FIND_LINKS"] == f"{tmp_path},file:///wheels"
    assert set_up.uv_environ({**environ, "UV_INDEX_URL": "file:///own"})["UV_INDEX_URL"] == "file:///own"


def test_failure_reason_is_most_specific_line() -> None:
    log = "Collecting a\nERROR: No matching distribution found for a==1\n\n[notice] a new release of pip\n"
    assert set_up.failure_reason(log) == "ERROR: No matching distribution found for a==1"
    assert set_up.failure_reason("") == "the set-up failed"


def test_interpreter_path_is_resolved_and_executable() -> None:
    path = Path(set_up.interpreter_path())
    assert path == path.resolve()
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({}, ""),
        ({"python3": "echo 0.02 quick"}, "quick"),
        ({"python3": "echo 0.028 little-quicker"}, ""),
        ({"python3": "echo 0.02 quick", "python3.13": "echo 0.01 quickest"}, "quickest"),
        ({"python3": "exit 1", "python": "echo 0.04 slow"}, ""),
    ],
)
def test_quickest_python_on_path_is_chosen(tmp_path: Path, others: dict[str, str], chosen: str) -> None:
    own = str(tmp_path / "own")
    for name, command in {"own": f"echo 0.03 {own}", **others}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path / 'gone'}{os.pathsep}{tmp_path}"}
    assert set_up.quickest_python(own, path) == (chosen or own)


def test_unusable_python_is_replaced_by_another(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\necho 0.03 usable\n")
    (tmp_path / "python3").chmod(0o755)
    assert set_up.quickest_python("/bin/false", {"PATH": str(tmp_path)}) == "usable"
    assert set_up.quickest_python("/bin/false", {"PATH": ""}) == "/bin/false"
    assert set_up.quickest_python("/bin/false", {"PATH": str(tmp_path), "PYTHON": "false"}) == "/bin/false"


def test_real_python_is_probed() -> None:
    assert set_up.quickest_python(set_up.interpreter_path(), {"PATH": ""}) == set_up.interpreter_path()


def test_named_python_is_used(checkout: Checkout) -> None:
    checkout.add_command("mine", STAND_IN)
    checkout.add_command("python3", "#!/bin/sh\nexit 1\n")
    completed = subprocess.run(
        [checkout.root / "run", "python", "a"],
        env={"PATH": str(checkout.commands), "HERE": str(checkout.root), "PYTHON": "mine"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (0, "ran a\n")


def test_invalid_named_python_is_reported(checkout: Checkout) -> None:
    completed = subprocess.run(
        [checkout.root / "run", "demo"],
        env={"PATH": str(checkout.commands), "HERE": str(checkout.root), "PYTHON": "gone"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == "./run: PYTHON=gone: not a Python >= 3.11: name another one, or unset PYTHON\n"
