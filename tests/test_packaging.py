"""The wheel in a new environment, and the modules that importing the product loads.

The tests build and install the wheel without a network, with the tools of this environment.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from packaging.requirements import Requirement

from tools.set_up import canonical_name, locked_blocks

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "delta_prop",
    "delta_prop_broker",
    "delta_prop_simulations",
    "delta_prop_sinks",
    "delta_prop_wire",
}
# Packages that `import delta_prop` must not load: those of extras, present or planned, and GPL ones.
NEVER_IMPORTED = {
    "aiostream",
    "lz4",
    "pyspark",
    "sqlalchemy",
    "textual",
    "trio",
    "usearch",
    "uvloop",
    "zstandard",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_only_the_typed_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top_names = {name.partition("/")[0] for name in names}
    assert {name for name in top_names if not name.endswith(".dist-info")} == {
        *PACKAGES,
        "pyspark_delta_prop.py",
    }
    assert {name.partition("/")[0] for name in names if name.endswith("/py.typed")} == PACKAGES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_coexists_with_foreign_packages_named_like_our_folders(wheel: Path, tmp_path: Path) -> None:
    site, python = fresh_environment(tmp_path)
    for name in ("broker", "sinks", "wire", "simulations"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'foreign'\n")
    install_wheel(wheel, site, python)
    program = f"""
        import importlib, json, broker, sinks, wire, simulations
        assert {{m.OWNER for m in (broker, sinks, wire, simulations)}} == {{"foreign"}}
        print(json.dumps([importlib.import_module(name).__file__ for name in {sorted(PACKAGES)}]))
    """
    files = json.loads(run_python(python, program, tmp_path))
    assert all(Path(file).is_relative_to(site) for file in files)
    assert (python.parent / "delta-prop").exists()


def test_spark_finds_data_source_of_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    site, python = fresh_environment(tmp_path)
    install_wheel(wheel, site, python)
    program = """
        import json, pyspark_delta_prop
        from pyspark.sql.datasource import DataSource
        found = pyspark_delta_prop.DefaultSource
        print(json.dumps([found.name(), issubclass(found, DataSource), pyspark_delta_prop.__file__]))
    """
    name, is_data_source, file = json.loads(run_python(python, program, tmp_path))
    assert (name, is_data_source) == ("delta_prop", True)
    assert Path(file).is_relative_to(site)


def test_import_loads_no_extra_and_no_gpl_module(tmp_path: Path) -> None:
    program = """
        import json, sys
        import delta_prop
        for name in getattr(delta_prop, "__all__", ()):
            getattr(delta_prop, name)
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
    """
    loaded = set(json.loads(run_python(Path(sys.executable), program, tmp_path)))
    assert "delta_prop" in loaded
    # The native core is taken wherever it is installed.
    assert loaded & (NEVER_IMPORTED | extra_modules()) - {"delta_prop_core"} == set()
    owners = metadata.packages_distributions()
    distributions = {name for module in loaded for name in owners.get(module, [])}
    assert {name for name in distributions if is_gpl(metadata.metadata(name))} == set()


def test_no_transitive_dependency_is_under_gpl() -> None:
    to_visit, visited = [Requirement(line).name for line in PROJECT["dependencies"]], set[str]()
    while to_visit:
        name = canonical_name(to_visit.pop())
        if name not in visited:
            visited.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            to_visit += [
                requirement.name
                for requirement in needed
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ]
    assert {name for name in visited if is_gpl(metadata.metadata(name))} == set()


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("License-Expression", "GPL-3.0-or-later", True),
        ("License", "AGPLv3", True),
        ("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)", True),
        ("License-Expression", "LGPL-2.1-or-later", False),
        ("Classifier", "License :: OSI Approved :: GNU Lesser General Public License v2 (LGPLv2)", False),
        ("License-Expression", "MIT", False),
    ],
)
def test_is_gpl_distinguishes_gpl_from_lgpl(field: str, text: str, expected: bool) -> None:
    package = Message()
    package[field] = text
    assert is_gpl(package) is expected


def test_wheel_declares_exactly_our_extras(wheel: Path) -> None:
    text = next(
        zipfile.ZipFile(wheel).read(n).decode()
        for n in zipfile.ZipFile(wheel).namelist()
        if n.endswith("METADATA")
    )
    extras = set(re.findall(r"(?m)^Provides-Extra: (.+)$", text))
    assert extras == set(PROJECT["optional-dependencies"])


def test_licence_list_holds_every_locked_package() -> None:
    listed = set(re.findall(r"(?m)^\| ([a-z0-9-]+) \|", (ROOT / "LICENSES.md").read_text()))
    assert listed - {"package"} == {
        name
        for lock in ("requirements.lock", "requirements-spark.lock")
        for name in locked_blocks((ROOT / lock).read_text())
    }


def fresh_environment(folder: Path) -> tuple[Path, Path]:
    """Return the site-packages and Python of a new environment with our dependencies, not our checkout."""
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site, python


def install_wheel(wheel: Path, site: Path, python: Path) -> None:
    """Install a wheel as pip does, but without pip, which an environment made by uv lacks."""
    scheme = {
        "purelib": str(site),
        "platlib": str(site),
        "headers": str(site),
        "scripts": str(python.parent),
        "data": str(site),
    }
    with WheelFile.open(wheel) as source:
        destination = SchemeDictionaryDestination(scheme, interpreter=str(python), script_kind="posix")
        install(source, destination, additional_metadata={})


def run_python(python: Path, program: str, cwd: Path) -> str:
    """Return a program's output, from an interpreter that sees neither the current folder nor PYTHONPATH."""
    lines = "\n".join(line[8:] for line in program.strip("\n").splitlines())
    completed = subprocess.run(
        [python, "-I", "-c", lines], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def extra_modules() -> set[str]:
    """Return the import names of every package of an extra."""
    requirements = [
        Requirement(line) for group in PROJECT["optional-dependencies"].values() for line in group
    ]
    return {requirement.name.replace("-", "_") for requirement in requirements}


def is_gpl(package: metadata.PackageMetadata | Message) -> bool:
    """True if a package's metadata states the GPL or the AGPL, not the LGPL."""
    fields = ("License-Expression", "License", "Classifier")
    declared = " ".join(
        line for field in fields for text in package.get_all(field) or [] for line in text.splitlines()[:1]
    )
    return re.search(r"(?<!L)GPL|GNU (Affero )?General Public", declared) is not None
