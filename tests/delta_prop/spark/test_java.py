"""Whoever lacks Java or a package is told in one line what brings it, before Spark says something else."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from delta_prop.spark import java, system
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def stand_in(folder: Path, text: str) -> str:
    """A java that says this to `-version`; returns the folder that is its JAVA_HOME."""
    path = folder / "bin" / "java"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "release"), [("17.0.15", 17), ("21", 21), ("24-ea", 24), ("11.0.2", 11), ("1.8.0_392", 8)]
)
def test_the_release_of_a_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, release: int
) -> None:
    home = stand_in(tmp_path, f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")
    monkeypatch.setenv("JAVA_HOME", home)
    if release >= java.RELEASE_MIN:
        assert java.check_java() == release
        return
    with pytest.raises(UsageError, match=f"needs Java 17 or later, but {home}/bin/java is Java {release}: "):
        java.check_java()


def test_a_java_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", stand_in(tmp_path, "exit 1"))
    with pytest.raises(UsageError, match="does not print its release"):
        java.check_java()


@pytest.mark.parametrize(
    ("manager", "cure"),
    [
        ("apt-get", "sudo apt-get install -y openjdk-17-jre-headless"),
        ("brew", "brew install openjdk@17"),
        (None, "install a Java from adoptium.net"),
    ],
)
def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch, manager: str | None, cure: str) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(system, "find_java", lambda: None)
    monkeypatch.setattr(system, "find_installer", lambda: manager)
    with pytest.raises(UsageError) as told:
        java.check_java()
    assert str(told.value) == f"Spark needs Java 17 or later, but no java was found on the PATH: {cure}"


def test_a_home_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(system, "find_installer", lambda: "dnf")
    with pytest.raises(UsageError) as told:
        java.check_java()
    assert str(told.value).endswith(
        f"JAVA_HOME={tmp_path} holds no bin/java: sudo dnf install -y java-17-openjdk-headless, "
        "and unset JAVA_HOME or set it to that one"
    )


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ({"pyarrow"}, "pyarrow is not installed: pip install 'delta-prop[spark]'"),
        (
            {"pyspark", "pandas"},
            "pyspark, pandas are not installed: pip install 'delta-prop[spark]'",
        ),
    ],
)
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, gone: set[str], told: str) -> None:
    monkeypatch.setattr(java, "find_spec", lambda name: None if name in gone else importlib.util)
    with pytest.raises(UsageError) as error:
        java.check_packages()
    assert str(error.value) == told
