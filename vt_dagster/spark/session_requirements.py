"""Checks that a Spark session has what the tables need: Delta Lake and UTC."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from vt_dagster.spark.jars import DELTA, one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
TIME_ZONE = "spark.sql.session.timeZone"
EXTENSIONS, CATALOG = "spark.sql.extensions", "spark.sql.catalog.spark_catalog"
_UTC = {
    "UTC",
    "Etc/UTC",
    "Zulu",
    "Etc/Zulu",
    "GMT",
    "Etc/GMT",
    "Universal",
    "Etc/Universal",
    "Z",
    "+00:00",
}
"""Accepted names of UTC, the time zone of all tables."""

_with_delta: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sessions with Delta Lake's jars. Cached: loaded jars remain, and the check takes time."""


def lacking(session: SparkSession) -> list[str]:
    """Returns the missing requirements of a session, each with the actual value; empty = complete.

    The settings are read each time, because other users of the session may change its time zone.
    """
    extensions = session.conf.get(EXTENSIONS, "") or ""
    catalog = session.conf.get(CATALOG, "") or ""
    zone = session.conf.get(TIME_ZONE, "") or ""
    found: list[str] = []
    if DELTA_EXTENSION not in extensions:
        found.append(f"{EXTENSIONS}={DELTA_EXTENSION}, it has {extensions or 'none'!r}")
    if not catalog:
        found.append(f"{CATALOG}={DELTA_CATALOG}, it has 'none'")
    if zone not in _UTC:
        found.append(f"{TIME_ZONE}=UTC, it has {zone!r}")
    if session not in _with_delta and catalog:
        try:
            session.catalog.currentDatabase()  # loads the catalog's class
            _with_delta.add(session)
        except Exception as error:  # from py4j or gRPC, depending on the class that is missing
            found.append(f"the jars of {DELTA} ({one_line(error)[:200]})")
    return found
