"""Dagster resources: the Spark session, and the warehouse that the tables are in.

Their keys begin with a prefix, so that a code location may have a ``spark`` of its own, and tables of a
second warehouse under another prefix.
"""

import time
from collections.abc import Callable
from typing import Any

import dagster as dg
from pydantic import Field, PrivateAttr
from pyspark.sql.utils import is_remote

from vt_dagster.spark.server import resolve_remote
from vt_dagster.spark.session import build_session
from vt_dagster.storage.places import address
from vt_dagster.storage.store import AssetStore, stores_of
from vt_dagster.topology.model import Stream

PREFIX = "vt_dagster"
"""What the keys of resources begin with, if nothing else is said."""


class SparkResource(dg.ConfigurableResource[None]):
    """A Spark session with Delta Lake and Kafka on board, started when a step first asks for it.

    ``spark_config`` takes any Spark setting and wins over the defaults for small runs. With
    ``{"spark.ui.enabled": "true"}`` Spark serves its own pages; the run's log says where.

    Dagster starts a process for each run. Where those take less than a million records,
    ``{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}`` saves a third of their processor
    time, which the JVM spends on compiling; over many more records it doubles it.
    """

    spark_config: dict[str, Any] = Field(
        default_factory=dict, description="Spark settings by name; they win over the defaults."
    )
    master: str = Field(default="local[*]", description="Spark master: local[*], spark://host:port, …")
    remote: str | None = Field(
        default=None,
        description="Spark Connect address, sc://host:port, or 'server', which `vt-dagster spark "
        "start` has started; master is then not used. None = what VT_DAGSTER_SPARK names, if any.",
    )
    app_name: str = Field(default="vt_dagster", description="The name that Spark shows.")

    _spark_session: Any = PrivateAttr(default=None)

    @property
    def spark_session(self) -> Any:
        """The session; the first who asks for it starts it."""
        if self._spark_session is None:
            self._spark_session = self._start()
        return self._spark_session

    def _start(self) -> Any:
        started = time.monotonic()
        conf = {name: str(value) for name, value in self.spark_config.items()}
        remote = resolve_remote(self.remote)
        session = build_session(self.app_name, master=self.master, remote=remote, conf=conf)
        local = None if is_remote() else session.sparkContext
        where = (remote or "").partition("/;")[0] if local is None else local.master
        pages = f", its pages at {local.uiWebUrl}" if local is not None and local.uiWebUrl else ""
        dg.get_dagster_logger().info(
            f"Spark {session.version} on {where}{pages} ({time.monotonic() - started:.1f} s)"
        )
        return session


class WarehouseResource(dg.ConfigurableResource[None]):
    """The directory under which every asset has its tables."""

    path: str = Field(
        default="data/warehouse",
        description="A directory, or a URL that both Spark and fsspec can read and write.",
    )


def keys_of(prefix: str) -> set[str]:
    """The keys of what a step needs."""
    return {spark_key(prefix), warehouse_key(prefix)}


def spark_key(prefix: str) -> str:
    """The key of the :class:`SparkResource`."""
    return f"{prefix}_spark"


def warehouse_key(prefix: str) -> str:
    """The key of the :class:`WarehouseResource`."""
    return f"{prefix}_warehouse"


def tables_key(prefix: str) -> str:
    """The key of the IO manager that gives tables to a user's own assets."""
    return f"{prefix}_tables"


def spark_of(context: Any, prefix: str) -> SparkResource:
    """The resource of a step or its IO manager that has the Spark session."""
    return getattr(context.resources, spark_key(prefix))


def warehouse_of(context: Any, prefix: str) -> str:
    """The directory of the tables, as this process sees it: a shared Spark may stand elsewhere."""
    return address(getattr(context.resources, warehouse_key(prefix)).path)


def stores_for(context: Any, prefix: str) -> Callable[[Stream], AssetStore]:
    """The tables of a step's asset and its inputs; what is written there is told in the run's log."""
    spark = spark_of(context, prefix)
    return stores_of(warehouse_of(context, prefix), lambda: spark.spark_session, context.log.info)
