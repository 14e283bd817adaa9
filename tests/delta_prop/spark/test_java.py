"""Missing Java or packages: one line names the fix, before Spark reports its own error."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from delta_prop.spark import java, system
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def make_fake_java(folder: Path, text: str) -> str:
    """Make a program `java` that runs the shell script `text`; return its JAVA_HOME."""
    path = folder / "bin" / "java"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "release"), [("17.0.15", 17), ("21", 21), ("24-ea", 24), ("11.0.2", 11), ("1.8.0_392", 8)]
)
def test_release_of_java_is_read_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, release: int
) -> None:
    home = make_fake_java(tmp_path, f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")
    monkeypatch.setenv("JAVA_HOME", home)
    if release >= java.RELEASE_MIN:
        assert java.check_java() == release
        return
    with pytest.raises(UsageError, match=f"needs Java 17 or later, but {home}/bin/java is Java {release}: "):
        java.check_java()


def test_java_that_prints_no_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", make_fake_java(tmp_path, "exit 1"))
    with pytest.raises(UsageError, match="does not print its release"):
        java.check_java()


@pytest.mark.parametrize(
    ("manager", "fix"),
    [
        ("apt-get", "sudo apt-get install -y openjdk-17-jre-headless"),
        ("brew", "brew install openjdk@17"),
        (None, "install a Java from adoptium.net"),
    ],
)
def test_missing_java_is_reported_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, manager: str | None, fix: str
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(system, "find_java", lambda: None)
    monkeypatch.setattr(system, "find_installer", lambda: manager)
    with pytest.raises(UsageError) as error:
        java.check_java()
    assert str(error.value) == f"Spark needs Java 17 or later, but no java was found on the PATH: {fix}"


def test_java_home_without_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(system, "find_installer", lambda: "dnf")
    with pytest.raises(UsageError) as error:
        java.check_java()
    assert str(error.value).endswith(
        f"JAVA_HOME={tmp_path} holds no bin/java: sudo dnf install -y java-17-openjdk-headless, "
        "and unset JAVA_HOME or set it to the new one"
    )


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({"pyarrow"}, "pyarrow is not installed: pip install 'delta-prop[spark]'"),
        (
            {"pyspark", "pandas"},
            "pyspark, pandas are not installed: pip install 'delta-prop[spark]'",
        ),
    ],
)
def test_missing_packages_are_reported(
    monkeypatch: pytest.MonkeyPatch, missing: set[str], expected: str
) -> None:
    monkeypatch.setattr(java, "find_spec", lambda name: None if name in missing else importlib.util)
    with pytest.raises(UsageError) as error:
        java.check_packages()
    assert str(error.value) == expected
