"""IO managers: DataFrames between ops, and tables for the user's own assets."""

from datetime import timedelta
from functools import cache
from typing import Any, get_args

import dagster as dg

from vt_dagster.errors import ContractError, ExecutorError
from vt_dagster.orchestration.resources import PREFIX, keys_of, spark_for, warehouse_of
from vt_dagster.storage.arrow_reader import head_of, look_up
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import left_out_by_clock
from vt_dagster.storage.read import Into, as_frame
from vt_dagster.storage.stale_reads import Read
from vt_dagster.topology.durations import at_clock, parse_time

READ = "vt_dagster/read"
AS_OF = "vt_dagster/as_of"
AS_KNOWN_AT = "vt_dagster/as_known_at"
PARTIAL = "vt_dagster/partial"
PARTITION_END = "partition_end"
READS = "vt_dagster/reads"
"""Metadata of a materialization: what it read of vt_dagster tables, a ``Read`` for each input."""
_WORDS = {AS_OF: "as of", AS_KNOWN_AT: "as known at"}
_TICK = timedelta(microseconds=1)
"""The resolution of timestamps: an exclusive end minus one tick is the last inclusive moment."""
_OURS = "vt_dagster/"
_LIBRARIES: dict[str, Into] = {
    "pandas": "pandas",
    "polars": "polars",
    "pyarrow": "arrow",
    "duckdb": "duckdb",
    "_duckdb": "duckdb",
}
"""The reader of an annotated type, by the type's package."""


class OpMemoryIOManager(dg.InMemoryIOManager):
    """Passes DataFrames between ops in one process; they are lazy plans, not data."""

    def load_input(self, context: dg.InputContext) -> Any:
        try:
            return super().load_input(context)
        except KeyError:
            upstream = context.upstream_output
            assert upstream is not None
            raise ExecutorError(
                f"the output {upstream.name!r} of step {upstream.step_key!r} is not in this process: "
                "vt_dagster's ops pass Spark DataFrames to each other, which needs one process for "
                "the whole run. Set executor=dagster.in_process_executor on the Definitions or the "
                "job; and re-run an asset as a whole, not from its failed step"
            ) from None


OP_MEMORY_IO_MANAGER = OpMemoryIOManager()
"""A single instance, because Dagster merges only identical resources of one key."""


class TablesIOManager(dg.IOManager):
    """Loads an asset's table for a user's own asset, as the DataFrame type of the parameter.

    ``prices: pd.DataFrame``, ``pl.DataFrame``, ``pl.LazyFrame``, ``pa.Table`` or
    ``duckdb.DuckDBPyRelation`` is read into memory without Spark; a parameter with a Spark annotation,
    or with none, gets a lazy Spark DataFrame.

    Metadata of the input sets what is read, ``dg.AssetIn(metadata={"vt_dagster/read": …})``:

    - ``current`` (default for tables): the current row of every key, without deleted keys;
    - ``versions``: every version of a versioned table, tombstones included;
    - ``log`` (default for streams): the append-only records;
    - with ``"vt_dagster/as_of": "2013-07-01T00:00:00Z"``: a versioned table as of that time
      (inclusive; UTC if it has no offset); a time before the table's history is an error, but with
      ``"vt_dagster/partial": True`` returns the current rows that were valid by then;
    - with ``"vt_dagster/as_of": "now"``: as of the clock's time when the input is read, for tables with
      future-dated rows;
    - with ``"vt_dagster/as_of": "partition_end"``: as of the end of the run's partition (exclusive: a
      version that begins at that midnight belongs to the next day); for a range of partitions in one
      run, the end of the range. A backfill reads what runs at those times would have read, plus
      records that came late since.

    The read is pinned to the log's last commit; with ``"vt_dagster/as_known_at"``, a time or
    ``partition_end``, it uses only records committed up to that time. The materialization's metadata
    ``vt_dagster/reads`` records, for each input, what was read and the log's position. This manager
    writes nothing: the tables are written by their own assets.

    Args:
        prefix: of its resource keys, ``<prefix>_spark`` and ``_warehouse``.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Accepts only None: the write op has committed already, and other values cannot be stored."""
        if obj is not None:
            raise ContractError(
                f"{context.asset_key.to_user_string()}: this IO manager only reads tables of "
                f"vt_dagster, but the asset returned a {type(obj).__name__}; give the asset another "
                "io_manager_key, or return nothing"
            )

    def load_input(self, context: dg.InputContext) -> Any:
        upstream = context.upstream_output
        assert upstream is not None
        name = "/".join(upstream.asset_key.path)
        given: dict[str, Any] = {**(context.definition_metadata or {})}
        wanted = {k: v.value if isinstance(v, dg.MetadataValue) else v for k, v in given.items()}
        unknown = {k for k in wanted if k.startswith(_OURS)} - {READ, AS_OF, AS_KNOWN_AT, PARTIAL}
        if unknown:
            raise ContractError(
                f"{name}: expected {READ!r}, {AS_OF!r}, {AS_KNOWN_AT!r} or {PARTIAL!r} in an input's "
                f"metadata, got {sorted(unknown)}; correct the key"
            )
        warehouse, partial = warehouse_of(context, self._prefix), wanted.get(PARTIAL, False)
        if not isinstance(partial, bool):
            raise ContractError(
                f"{name}: expected {PARTIAL!r} in an input's metadata to be True or False, got "
                f"{partial!r}; correct it"
            )
        what = wanted.get(READ)
        as_of, known = (
            _time(context, name, option, wanted.get(option)) for option in (AS_OF, AS_KNOWN_AT)
        )
        as_of = at_clock(as_of)
        if known is not None:
            warning = left_out_by_clock(name, parse_time(known), head_of(warehouse, name)[1])
            if warning is not None:
                context.log.warning(warning)
        kind = context.dagster_type.typing_type
        of_optional = [one for one in get_args(kind) if one is not type(None)]
        if type(None) in get_args(kind) and len(of_optional) == 1:
            kind = of_optional[0]
        annotated = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
        library = _LIBRARIES.get(annotated.partition(".")[0])
        if library is None:
            store = AssetStore.open(warehouse, name, spark_for(context, self._prefix)())
            at = store.snapshot()
            rows = store.read(what, as_of, partial, known, at)
            assert at.head is not None
            _record_read(context, Read.of(name, at.head.commit, what, as_of, known))
            return rows
        head = head_of(warehouse, name)
        rows = as_frame(look_up(warehouse, name, what, None, as_of, partial, known, head), library)
        _record_read(context, Read.of(name, head[1], what, as_of, known))
        return rows.lazy() if annotated.endswith(".LazyFrame") else rows


def _record_read(context: dg.InputContext, read: Read) -> None:
    """Adds a read to the metadata of all materializations of the step that loads the input."""
    try:
        step = context.step_context
    except dg.DagsterInvariantViolationError:  # loaded outside of a step
        return
    for output in step.op_def.output_defs:
        if not output.is_dynamic:
            before = (step.get_output_metadata(output.name) or {}).get(READS, {})
            step.add_output_metadata({READS: {**before, context.name: read.as_json}}, output.name)


def _time(context: dg.InputContext, name: str, option: str, wanted: Any) -> str | None:
    """Returns the time set in an input's metadata; for ``partition_end`` the last moment of the run's
    partition."""
    if wanted is not None and not isinstance(wanted, str):
        raise ContractError(
            f"{name}: expected {option!r} in an input's metadata to be a text like "
            f"'2013-07-01T12:00:00Z', got {wanted!r}; correct it"
        )
    if wanted != PARTITION_END:
        return wanted
    try:
        step, why = context.step_context, "it runs without a partition"
    except dg.DagsterInvariantViolationError:
        raise ContractError(
            f"{name}: expected to be read in the run of a partition, because its input is to be read "
            f"{_WORDS[option]} {PARTITION_END!r}, got: it is loaded outside of a run; set a time to "
            "read as of"
        ) from None
    if step.has_partition_key or step.has_partition_key_range:
        try:
            return (step.partition_time_window.end - _TICK).isoformat()
        except dg.DagsterError as error:
            why = str(error)
    raise ContractError(
        f"{name}: expected {step.step.key}, which reads it {_WORDS[option]} {PARTITION_END!r}, to be "
        f"partitioned by time and run for a partition, got: {why}. Give it a partitions_def such as "
        "dagster.DailyPartitionsDefinition, or set a time to read as of"
    )


@cache
def tables_io_manager(prefix: str = PREFIX) -> dg.IOManagerDefinition:
    """Returns the resource that loads tables for assets; see :class:`TablesIOManager`."""
    needed = keys_of(prefix)
    return dg.IOManagerDefinition(lambda _: TablesIOManager(prefix), required_resource_keys=needed)
