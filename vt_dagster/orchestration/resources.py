"""Dagster resources: the Spark session, and the warehouse that holds the tables.

Their keys have a prefix, so that a code location can have its own ``spark``, and the tables of a second
warehouse under another prefix.
"""

import re
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import PurePath
from typing import Any, Protocol

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr, field_validator
from pyspark.sql.utils import is_remote

from vt_dagster.errors import SparkUnavailableError, StorageError, TopologyError
from vt_dagster.runs.pin import before_of, from_logs, from_source
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.spark.class_archive import JVM_OPTIONS
from vt_dagster.spark.jars import resolve_jars
from vt_dagster.spark.server import resolve_remote
from vt_dagster.spark.session import (
    FEW_QUERIES,
    build_session,
    close_when_interrupted,
    connect_settings,
    lacking,
    session_settings,
    shown,
    silence_connect,
)
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.catalog import require_catalog
from vt_dagster.storage.delta import place_of, require_place
from vt_dagster.topology.model import Stream

PREFIX = "vt_dagster"
"""The default prefix of resource keys."""


class SparkResource(dg.ConfigurableResource[None]):
    """A Spark session with Delta Lake and Kafka, started when a step first uses it.

    It is the session of a ``LazyPySparkResource`` of dagster-pyspark, with the jars and settings that
    tables need. To use your own session unchanged, pass a ``PySparkResource`` or
    ``LazyPySparkResource`` to ``build_definitions(spark=…)``.

    ``spark_config`` takes any Spark setting and overrides the defaults for small runs. With
    ``{"spark.ui.enabled": "true"}`` Spark serves its UI; the run's log has its address.

    If the runs and the tables of all assets that a process executes are small, the JVM starts with its
    fast compiler. That saves 40 % of the CPU time of such a process. For millions of records the fast
    compiler doubles the CPU time. To choose it yourself, set
    ``{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}``; 4 instead of 1 never uses it.
    """

    model_config = ConfigDict(extra="forbid")

    spark_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Spark settings by name: texts, numbers, booleans or environment variables; they "
        "override the defaults.",
    )
    master: str = Field(default="local[*]", description="Spark master: local[*], spark://host:port, …")
    remote: str | None = Field(
        default=None,
        description="Spark Connect address, sc://host:port, or 'server' for the one that `vt-dagster "
        "spark start` started; replaces master. None = the value of VT_DAGSTER_SPARK, if set.",
    )
    app_name: str = Field(default="vt_dagster", description="The application name in Spark's UI.")

    @field_validator("spark_config")
    @classmethod
    def _of_texts(cls, spark_config: dict[str, Any]) -> dict[str, Any]:
        for name, value in spark_config.items():
            if name != name.strip() or not name:
                raise TopologyError(
                    "SparkResource: expected names of Spark settings in spark_config, such as "
                    f"'spark.driver.memory', got {name!r}; correct it"
                )
            if not isinstance(value, str | int | float) and _variable(value) is None:
                raise TopologyError(
                    f"SparkResource: expected {name} of spark_config to be a text, a number or a "
                    f"boolean, got a {type(value).__name__}; correct it"
                )
            if name in ("spark.master", "spark.remote"):
                raise TopologyError(
                    f"SparkResource: expected no {name} in spark_config, got {shown(str(value))!r}; "
                    f"set it as {name.removeprefix('spark.')} of SparkResource"
                )
        return spark_config

    @field_validator("master")
    @classmethod
    def _named(cls, master: str) -> str:
        if not master.strip():
            raise TopologyError(
                "SparkResource: expected master to be a Spark master such as local[*] or "
                f"spark://host:7077, got {master!r}; set it, or leave it out"
            )
        return master

    @field_validator("remote")
    @classmethod
    def _addressed(cls, remote: str | None) -> str | None:
        # A word is "server", or the name of an environment variable.
        if remote and not re.fullmatch(r"\w+|sc://.*", remote):
            raise TopologyError(
                "SparkResource: expected remote to be 'server' or a Spark Connect address like "
                f"sc://host:15002, got {shown(remote)!r}; correct it: a Spark master is set as master"
            )
        return remote

    _spark_session: Any = PrivateAttr(default=None)
    _few_rows: bool = PrivateAttr(default=False)

    @property
    def spark_session(self) -> Any:
        """The session, started at first access."""
        if self._spark_session is None:
            self._spark_session = self._start()
        return self._spark_session

    def expect_few_rows(self) -> None:
        """Lets the JVM start with its fast compiler only. Without effect on a JVM that has started, on
        a Spark Connect server, and if ``spark_config`` chooses a compiler."""
        self._few_rows = True

    @property
    def may_start_jvm(self) -> bool:
        """Whether its session, not started yet, may start a JVM in this process."""
        return self._spark_session is None and resolve_remote(self.remote) is None

    def pyspark_config(self) -> dict[str, str]:
        """Returns all settings of its session, jars included: the ``spark_config`` of a
        ``PySparkResource`` or ``LazyPySparkResource`` whose session tables can use.

        The first call on a machine downloads the jars, see ``resolve_jars``.
        """
        remote, conf = resolve_remote(self.remote), self._conf()
        if remote is not None:
            return connect_settings(self.app_name, remote, conf)
        return session_settings(self.app_name, self.master, resolve_jars(), conf)

    def _conf(self) -> dict[str, str]:
        return {name: _text(name, value) for name, value in self.spark_config.items()}

    def _start(self) -> Any:
        # Imported here: runs without new records need no session and save 0.2 s.
        from dagster_pyspark import LazyPySparkResource

        started = time.monotonic()
        remote, conf = resolve_remote(self.remote), self._conf()
        if self._few_rows and remote is None:
            # The JVM uses the last value of a repeated option, so the user's own overrides it.
            conf[JVM_OPTIONS] = f"{FEW_QUERIES[JVM_OPTIONS]} {conf.get(JVM_OPTIONS, '')}".strip()
        session = build_session(
            self.app_name,
            master=self.master,
            remote=remote,
            conf=conf,
            create=lambda settings: LazyPySparkResource(spark_config=settings).spark_session,
        )
        _log_session(session, (remote or "").partition("/;")[0], started)
        return session


def _variable(value: Any) -> dg.EnvVar | None:
    """Returns the environment variable that a setting names, itself or in Dagster's config as
    ``{"env": name}``; None = the setting is a value."""
    if isinstance(value, dg.EnvVar):
        return value
    named = isinstance(value, dict) and [*value] == ["env"] and isinstance(value["env"], str)
    return dg.EnvVar(value["env"]) if named else None


def _text(name: str, value: Any) -> str:
    variable = _variable(value)
    if variable is None:
        return str(value).lower() if isinstance(value, bool) else str(value)
    found = variable.get_value()
    if found is None:
        raise SparkUnavailableError(
            f"{name}: expected the environment variable {variable.env_var_name} to be set, got none; "
            "set it for this process"
        )
    return found


class PySpark(Protocol):
    """A resource with a Spark session: ``PySparkResource`` and ``LazyPySparkResource`` of
    dagster-pyspark, or any other with the attribute ``spark_session``."""

    @property
    def spark_session(self) -> Any: ...


def require_spark(spark: Any) -> None:
    """Requires a resource with a Spark session, when definitions load.

    Raises:
        TopologyError: the object is no such resource.
    """
    made_by_function = isinstance(spark, dg.ResourceDefinition)  # its value is only known in a run
    if not made_by_function and not (
        isinstance(spark, dg.ConfigurableResource) and hasattr(type(spark), "spark_session")
    ):
        raise TopologyError(
            "spark: expected a SparkResource, or a PySparkResource or LazyPySparkResource of "
            f"dagster_pyspark, got {type(spark).__module__}.{type(spark).__qualname__}; give the "
            "resource itself, for example spark=LazyPySparkResource(spark_config=…)"
        )


def session_of(spark: PySpark) -> Any:
    """Returns the Spark session of a resource.

    Args:
        spark: a :class:`SparkResource`, or a resource of dagster-pyspark; also one that was not set up
            by a Dagster run.

    Raises:
        SparkUnavailableError: the session lacks something that the tables need.
    """
    started, kind = time.monotonic(), type(spark).__name__
    session = getattr(spark, "spark_session", None)
    if session is None and isinstance(spark, dg.ConfigurableResource):
        spark.setup_for_execution(dg.build_init_resource_context())
        session = getattr(spark, "spark_session", None)
    if session is None:
        raise SparkUnavailableError(
            f"Expected a resource with a Spark session in its attribute spark_session, got {kind} "
            "without one. Give a SparkResource, PySparkResource or LazyPySparkResource."
        )
    lacks = lacking(session)
    if lacks:
        raise SparkUnavailableError(
            f"Expected the Spark session of {kind} to have Delta Lake and UTC, but it lacks "
            f"{'; '.join(lacks)}. Add that to its spark_config, or use all settings that tables need, "
            "jars included: spark_config=SparkResource(spark_config={…}).pyspark_config(). They apply "
            "only at the start of Spark: the first session of a process sets them."
        )
    if not isinstance(spark, SparkResource) and session not in _logged:
        close_when_interrupted(session)
        silence_connect()
        _logged.add(session)
        _log_session(session, "", started, f" of {kind}")
    return session


_logged: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sessions of other resources that are already in a run's log."""


def _log_session(session: Any, where: str, started: float, whose: str = "") -> None:
    """Logs the Spark version, address and start time of a session."""
    local = None if is_remote() else session.sparkContext
    where = where if local is None else local.master
    pages = f", UI at {local.uiWebUrl}" if local is not None and local.uiWebUrl else ""
    options = "" if local is None else local.getConf().get(JVM_OPTIONS) or ""
    few = ", compiling fast, for few rows" if FEW_QUERIES[JVM_OPTIONS] in options else ""
    on = f" on {where}" if where else ""
    dg.get_dagster_logger().info(
        f"Spark {session.version}{whose}{on}{few}{pages} ({time.monotonic() - started:.1f} s)"
    )


class WarehouseResource(dg.ConfigurableResource[None]):
    """The directory that holds the tables of all assets."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(
        default="data/warehouse",
        description="A directory, or a URL that both Spark and fsspec can read and write.",
    )
    catalog: str | None = Field(
        default=None,
        description="A schema of the Spark session's catalog, such as bronze or lake.bronze: each run "
        "registers its tables there. None = no names.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _as_text(cls, path: Any) -> Any:
        return str(path) if isinstance(path, PurePath) else path

    @field_validator("path")
    @classmethod
    def _placed(cls, path: str) -> str:
        require_target("WarehouseResource: path", path)  # of a variable: its name, its value in a run
        return path

    @field_validator("catalog")
    @classmethod
    def _checked(cls, catalog: str | None) -> str | None:
        if catalog is not None:
            require_catalog(catalog)
        return catalog


def require_target(what: str, path: str) -> None:
    """Requires the path of a directory to write to, when definitions load.

    Args:
        what: the option, for the message.

    Raises:
        TopologyError: the path is not valid.
    """
    try:
        require_place(path)
    except StorageError as error:
        said = f"{what}: {error}"
        raise TopologyError(said) from None


def require_warehouse(warehouse: Any) -> None:
    """Requires a resource of a warehouse, when definitions load.

    Raises:
        TopologyError: the object is no such resource.
    """
    # Of ``configure_at_launch()``, or made by a function: its value is only known in a run.
    made_in_run = getattr(warehouse, "resource_cls", None) is WarehouseResource
    if not made_in_run and not isinstance(warehouse, WarehouseResource | dg.ResourceDefinition):
        raise TopologyError(
            "warehouse: expected a directory, a URL or a WarehouseResource, got "
            f"{warehouse!r}; correct it"
        )


def keys_of(prefix: str) -> set[str]:
    """Returns the resource keys that a step needs."""
    return {spark_key(prefix), warehouse_key(prefix)}


def spark_key(prefix: str) -> str:
    """Returns the key of the resource with the Spark session."""
    return f"{prefix}_spark"


def warehouse_key(prefix: str) -> str:
    """Returns the key of the :class:`WarehouseResource`."""
    return f"{prefix}_warehouse"


def tables_key(prefix: str) -> str:
    """Returns the key of the IO manager that loads tables into the user's own assets."""
    return f"{prefix}_tables"


def spark_for(context: Any, prefix: str) -> Callable[[], Any]:
    """Returns a function that gives the Spark session of a step or an IO manager: started and checked
    at the first call, see :func:`session_of`."""
    resource = getattr(context.resources, spark_key(prefix))
    return cache(lambda: session_of(resource))


_FEW_ROWS = 1_000_000
"""Maximum rows of a log with which the other work of a run, such as writing the view, counts as
small."""


_NODES: weakref.WeakKeyDictionary[Any, tuple[Stream, str]] = weakref.WeakKeyDictionary()
"""By op of an asset or of its checks: the asset, and the prefix of the op's resource keys."""


def node_of_op(op: Any, node: Stream, prefix: str) -> None:
    """Records the node and the prefix of an op, for :func:`expect_few_rows` and
    :func:`declared_nodes`."""
    _NODES[op] = node, prefix


def declared_nodes(defs: dg.Definitions) -> list[tuple[Stream, str]]:
    """Returns the stream or table of each asset, and of each asset's checks, with the prefix of its
    resource keys, ordered by key. The node of a graph asset is only known if it has checks."""
    ops = [one.node_def for one in defs.resolve_asset_graph().assets_defs if one.is_executable]
    return sorted((_NODES[op] for op in ops if op in _NODES), key=lambda found: found[0].path)


def expect_few_rows(context: Any, prefix: str, node: Stream, rows: int) -> None:
    """Lets Spark start for few rows if every step of the process has few rows, because the JVM cannot
    change its compiler later. Other ops than those of assets and their checks, and assets of another
    prefix, count as steps with many rows: their size is unknown.

    Args:
        rows: of the asset's log.
    """
    resource = getattr(context.resources, spark_key(prefix))
    if rows > _FEW_ROWS or not isinstance(resource, SparkResource) or not resource.may_start_jvm:
        return
    step = context.get_step_execution_context()
    others = {*step.execution_plan.step_keys_to_execute} - {asset_op(node), check_op(node)}
    warehouse = warehouse_of(context, prefix)
    if all(_has_few_rows(step.job_def, key, prefix, warehouse) for key in others):
        resource.expect_few_rows()


def _has_few_rows(job: dg.JobDefinition, step: str, prefix: str, warehouse: str) -> bool:
    if not job.has_node_named(step):  # a step of a graph
        return False
    node, of = _NODES.get(job.get_node_named(step).definition, (None, prefix))
    if node is None or of != prefix or isinstance(node.source, FrameSource):
        return False

    def stores(one: Stream) -> AssetStore:
        return AssetStore(warehouse, one)  # without a session: to look at logs and sources needs none

    store = stores(node)
    try:
        at = store.snapshot()
        if before_of(node, at.head).total > _FEW_ROWS:
            return False
        if node.operator is not None:
            return from_logs(node, store, at, stores).small
        return from_source(node, store, at, None).small
    except Exception:  # its own step reports the error
        return False


def require_key(node: Stream, keys: Iterable[dg.AssetKey]) -> None:
    """Requires that an asset, or the asset of some checks, still has the key of its stream or table:
    Dagster's loaders can put a prefix before it.

    Raises:
        TopologyError: it has another key.
    """
    wanted, got = dg.AssetKey(node.path), sorted(key.to_user_string() for key in keys)
    if wanted.to_user_string() not in got:
        raise TopologyError(
            f"{node.name}: expected its asset to have the key {wanted.to_user_string()}, which is also "
            f"the directory of its tables, got {', '.join(got)}; set the key_prefix of the stream or "
            "table instead of that of Dagster's load_assets_from_modules or with_attributes"
        )


def asset_op(node: Stream) -> str:
    """Returns the name of the op, and of the step, of an asset."""
    return dg.AssetKey(node.path).to_python_identifier()


def check_op(node: Stream) -> str:
    """Returns the name of the op of an asset's checks."""
    return f"check_{asset_op(node)}"


def warehouse_of(context: Any, prefix: str) -> str:
    """Returns the directory of the tables as an absolute address: a shared Spark may have
    another working directory.

    Raises:
        StorageError: a resource that is made by a function has no valid path.
    """
    return place_of(getattr(context.resources, warehouse_key(prefix)).path)


def catalog_of(context: Any, prefix: str) -> str | None:
    """Returns the schema in which the tables are registered by name; None = they are not."""
    return getattr(context.resources, warehouse_key(prefix)).catalog


def stores_for(context: Any, prefix: str) -> Callable[[Stream], AssetStore]:
    """Returns a function from streams and tables to their stores, which log writes to the run's log."""
    spark = spark_for(context, prefix)
    return stores_of(warehouse_of(context, prefix), spark, context.log.info)
