"""Checks that Spark can start here: it needs Java, but does not say so by itself.

Needs neither Spark nor pyarrow, to report their absence with the command that installs them.
"""

from __future__ import annotations

from importlib.util import find_spec

from delta_prop.spark import system
from delta_prop_wire.errors import UsageError

RELEASE_MIN = 17
_INSTALL_COMMANDS = {
    "apt-get": "sudo apt-get install -y openjdk-17-jre-headless",
    "dnf": "sudo dnf install -y java-17-openjdk-headless",
    "apk": "sudo apk add openjdk17-jre-headless",
    "brew": "brew install openjdk@17",
}
_PACKAGES = ("pyspark", "pyarrow", "pandas")


def check_java() -> int:
    """Return the release of the Java that Spark would use.

    Raises UsageError with the command that installs one.
    """
    path = system.find_java()
    release = None if path is None else system.read_java_release(path)
    if release is not None and release >= RELEASE_MIN:
        return release
    home = system.read_variable("JAVA_HOME")
    if path is None:
        problem = f"JAVA_HOME={home} holds no bin/java" if home else "no java was found on the PATH"
    else:
        problem = f"{path} is Java {release}" if release is not None else f"{path} does not print its release"
    raise UsageError(f"Spark needs Java {RELEASE_MIN} or later, but {problem}: {_fix_of(home)}")


def check_packages() -> None:
    """Check that the packages for jobs are installed. Raises UsageError with the command to install them."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'delta-prop[spark]'"
        )


def find_missing() -> str | None:
    """Return the reason why Spark cannot start here, with the fix; None if it can."""
    try:
        check_java()
        check_packages()
    except UsageError as error:
        return str(error)
    return None


def _fix_of(home: str) -> str:
    command = _INSTALL_COMMANDS.get(system.find_installer() or "", "install a Java from adoptium.net")
    return f"{command}{', and unset JAVA_HOME or set it to the new one' if home else ''}"
