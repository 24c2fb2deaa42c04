"""How DataFrames come to ops and to a user's own assets."""

from typing import Any

import dagster as dg

from vt_dagster.errors import ContractError, ExecutorError
from vt_dagster.storage.lookup import Into, read
from vt_dagster.storage.store import AssetStore

READ = "vt_dagster/read"
AS_OF = "vt_dagster/as_of"
PARTIAL = "vt_dagster/partial"
_OURS = "vt_dagster/"
_LIBRARIES: dict[str, Into] = {
    "pandas": "pandas",
    "polars": "polars",
    "pyarrow": "arrow",
    "duckdb": "duckdb",
    "_duckdb": "duckdb",
}
"""What reads for an annotation, by the package that the annotated type is of."""


class OpMemoryIOManager(dg.IOManager):
    """Hands DataFrames from op to op within one process; they are lazy plans, not data."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], Any] = {}

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        self._values[context.run_id, context.step_key, context.name] = obj

    def load_input(self, context: dg.InputContext) -> Any:
        upstream = context.upstream_output
        assert upstream is not None
        try:
            return self._values[upstream.run_id, upstream.step_key, upstream.name]
        except KeyError:
            raise ExecutorError(
                f"the output {upstream.name!r} of step {upstream.step_key!r} is not in this process: "
                "vt_dagster's ops pass Spark DataFrames to each other, which needs one process for "
                "the whole run. Set executor=dagster.in_process_executor on the Definitions or the "
                "job; and re-run an asset as a whole, not from its failed step"
            ) from None


class TablesIOManager(dg.IOManager):
    """Gives an asset's table to a user's own asset, as the DataFrame that its parameter is annotated
    with.

    ``prices: pd.DataFrame``, ``pl.DataFrame``, ``pl.LazyFrame``, ``pa.Table`` or
    ``duckdb.DuckDBPyRelation`` is read without Spark, into memory; without an annotation, and with a
    Spark one, it is a lazy Spark DataFrame.

    What is read is said on the input, ``dg.AssetIn(metadata={"vt_dagster/read": …})``:

    - ``current`` (default of tables): the current row of every key; deleted keys are not there;
    - ``versions``: every version of a versioned table, tombstones included;
    - ``log`` (default of streams): the append-only records;
    - with ``"vt_dagster/as_of": "2013-07-01T00:00:00Z"``: a versioned table as of that time
      (inclusive; without an offset it is UTC); a time that its history does not reach back to is an
      error, but with ``"vt_dagster/partial": True`` gives the rows that are left.

    What is read is as of the log's last commit. Nothing is written by this manager: the tables are
    written by their own assets. It uses the resources ``spark`` and ``warehouse``.
    """

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """The write op has committed already; anything else cannot be stored here."""
        if obj is not None:
            raise ContractError(
                f"{context.asset_key.to_user_string()}: this IO manager only reads tables of "
                f"vt_dagster, but the asset returned a {type(obj).__name__}; give the asset another "
                "io_manager_key, or return nothing"
            )

    def load_input(self, context: dg.InputContext) -> Any:
        upstream = context.upstream_output
        assert upstream is not None
        name = upstream.asset_key.path[-1]
        wanted = context.definition_metadata or {}
        unknown = {k for k in wanted if k.startswith(_OURS)} - {READ, AS_OF, PARTIAL}
        if unknown:
            raise ContractError(
                f"{name}: expected {READ!r}, {AS_OF!r} or {PARTIAL!r} in an input's metadata, got "
                f"{sorted(unknown)}; correct the key"
            )
        resources: Any = context.resources
        warehouse, partial = resources.warehouse.path, wanted.get(PARTIAL, False)
        kind = context.dagster_type.typing_type
        annotated = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
        library = _LIBRARIES.get(annotated.partition(".")[0])
        if library is None:
            store = AssetStore.open(warehouse, name, resources.spark.spark_session)
            return store.read(wanted.get(READ), wanted.get(AS_OF), partial)
        what, as_of = wanted.get(READ), wanted.get(AS_OF)
        rows = read(name, warehouse=warehouse, what=what, as_of=as_of, partial=partial, into=library)
        return rows.lazy() if annotated.endswith(".LazyFrame") else rows


@dg.io_manager(required_resource_keys={"spark", "warehouse"})
def tables_io_manager() -> TablesIOManager:
    """The resource that gives tables to assets; see :class:`TablesIOManager`."""
    return TablesIOManager()
