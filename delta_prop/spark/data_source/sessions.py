"""Opens a Spark session on this machine, for scripts, tests and the command; a cluster provides its own.

Its workers run this Python interpreter, where delta-prop is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop.spark import system
from delta_prop.spark.java import check_java, check_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties").as_uri()
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Full compilation of code that runs once would delay the first job by a second.
    "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile={_LOG_SETTINGS}",
}


def session(
    name: str = "delta-prop", *, master: str = "local[2,3]", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the active session or a new one; the default `master` has two cores and three attempts per task.

    Raises UsageError if Java or a package is missing, with the command that installs it.
    """
    check_packages()
    check_java()
    # Else the workers would run the first python3 on the PATH, which may lack this package.
    system.set_default("PYSPARK_PYTHON", system.PYTHON)
    system.set_default("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    from delta_prop.spark.data_source.source import register

    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**_DEFAULTS, **(settings or {})}.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)  # Spark itself finds no source in a path with a space
    return spark
