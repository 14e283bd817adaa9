"""Whether Spark can start here: it needs Java, and says nothing of that by itself.

Needs neither Spark nor pyarrow, so that whoever lacks them is told what brings them.
"""

from __future__ import annotations

from importlib.util import find_spec

from delta_prop.spark import edge
from delta_prop_wire.errors import UsageError

RELEASE_MIN = 17
_CURES = {
    "apt-get": "sudo apt-get install -y openjdk-17-jre-headless",
    "dnf": "sudo dnf install -y java-17-openjdk-headless",
    "apk": "sudo apk add openjdk17-jre-headless",
    "brew": "brew install openjdk@17",
}
_PACKAGES = ("pyspark", "pyarrow", "pandas")


def check_java() -> int:
    """The release of the Java that Spark would use. Raises UsageError with the line that cures it."""
    path = edge.java_path()
    release = None if path is None else edge.java_release(path)
    if release is not None and release >= RELEASE_MIN:
        return release
    home = edge.setting("JAVA_HOME")
    if path is None:
        found = f"JAVA_HOME={home} holds no bin/java" if home else "no java was found on the PATH"
    else:
        found = f"{path} is Java {release}" if release is not None else f"{path} does not tell its release"
    raise UsageError(f"Spark needs Java {RELEASE_MIN} or later, and {found}: {_cure(home)}")


def check_packages() -> None:
    """Whether the packages are there that jobs need. Raises UsageError with the line that cures it."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'delta-prop[spark]'"
        )


def missing() -> str | None:
    """What Spark lacks to start here, with the line that cures it; None if nothing."""
    try:
        check_java()
        check_packages()
    except UsageError as error:
        return str(error)
    return None


def _cure(home: str) -> str:
    brings = _CURES.get(edge.installer() or "", "install a Java from adoptium.net")
    return f"{brings}{', and unset JAVA_HOME or let it name that one' if home else ''}"
