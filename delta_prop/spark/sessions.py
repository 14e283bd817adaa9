"""A Spark session on this machine, for scripts, tests and the command; a cluster brings its own.

Its workers run this very Python, where delta-prop is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop.spark import edge
from delta_prop.spark.java import check_java, check_packages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession


_LOGGING = Path(__file__).with_name("log4j2.properties").as_uri()
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Of the time until the first job a second goes to compiling what runs once.
    "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile={_LOGGING}",
}


def session(
    name: str = "delta-prop", *, master: str = "local[2,3]", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session that there is, or a new one. `master`: two cores, and three attempts for each task.

    Raises UsageError where Java or a package is missing, saying what brings it.
    """
    check_packages()
    check_java()
    # Else the workers would be the first python3 on the PATH, which need not know this package.
    edge.set_default("PYSPARK_PYTHON", edge.PYTHON)
    edge.set_default("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    from delta_prop.spark.source import register

    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**_DEFAULTS, **(settings or {})}.items():
        builder = builder.config(key, value)
    found: SparkSession = builder.getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    register(found)  # Spark looks for sources only where a shell finds its Python: not in a path with a space
    return found
