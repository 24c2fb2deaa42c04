"""DataFrames as sources: the result of a user's function, or an upstream asset.

A *delivery* is the result of one run of a function, one partition, or one materialization of an
upstream asset. Each is consumed once; the consumed deliveries are stored beside the commit.

DataFrames of pandas, Polars, Arrow and DuckDB are converted to Arrow with the types of a schema,
without Spark. A value that does not fit its column makes the row unreadable. A column of another kind
of type is an error: only its author knows how to convert it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from typing import Any, TypeAlias, cast

import pyarrow
import pyarrow as pa
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, StructType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.arrival_order import CHUNK
from vt_dagster.core.log_columns import arrow_schema, spark_schema
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, Reason, as_json, time_of
from vt_dagster.errors import ContractError, SourceError, counted
from vt_dagster.sources.base import Limited, Repeatable, by_name, require_limits
from vt_dagster.sources.value_reader import is_no_text
from vt_dagster.storage.commit_log import Commit, Ranges
from vt_dagster.topology.durations import DAY, FIRST_TIME, LAST_TIME
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_types
from vt_dagster.topology.schema import differences

# DataFrames in this process


pc: Any = pyarrow.compute  # has no types

ROW = "_row"
"""Column with the row number in the DataFrame, from 1 (BIGINT); null for Spark, which has no order."""
_WIDEST = pa.decimal128(38, 0)
_KINDS = (
    ("boolean", pa.types.is_boolean),
    ("decimal", pa.types.is_decimal),
    ("float", pa.types.is_floating),
    ("integer", pa.types.is_integer),
    ("time", lambda t: pa.types.is_timestamp(t) or pa.types.is_date(t)),
    ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or str(t) == "string_view"),
    ("bytes", lambda t: "binary" in str(t)),
    ("list", lambda t: "list" in str(t).partition("<")[0]),
    ("struct", pa.types.is_struct),
    ("map", pa.types.is_map),
)
_ALSO = {"float": {"integer"}, "decimal": {"integer"}, "integer": {"float", "decimal"}}
"""By type of column, the other types that it accepts if each value converts exactly. For example,
pandas stores integers with a null as floats."""


@dataclass(frozen=True)
class LocalFrame:
    """The rows of a DataFrame in memory.

    Args:
        rows: the schema's columns, ``_row``, ``_raw`` (a bad row as JSON; else null) and ``_reason``.
        extra: columns that the schema lacks; they are dropped.
    """

    rows: pa.Table
    extra: Sequence[str]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.rows.num_rows

    def digest(self) -> str:
        """Returns a digest of the rows, independent of their order."""
        total = 0
        for batch in self.rows.drop_columns([ROW]).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                digest = hashlib.blake2b(repr(row).encode("utf-8"), digest_size=16).digest()
                total += int.from_bytes(digest, "big")
        return f"{self.count}:{total % (1 << 128):032x}"

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns a Spark DataFrame of the rows."""
        return spark.createDataFrame(self.rows.combine_chunks(), spark_schema(self.rows.schema))

    def release(self) -> None:
        """Does nothing: Spark holds no data."""


def local_frame(name: str, value: Any, schema: StructType) -> LocalFrame | None:
    """Converts a DataFrame of pandas, Polars (also lazy), Arrow or DuckDB; returns None for other
    values.

    Naive times are UTC. A pandas index is not a column: use ``reset_index`` to keep it.

    Args:
        name: the stream or table, for messages.

    Raises:
        ContractError: a column is missing, or of another kind of type.
    """
    table = _as_arrow(name, value)
    if table is None:
        return None
    if not table.column_names and not table.num_rows:  # pd.DataFrame([]): no records, no columns
        table = arrow_schema(schema).empty_table()
    require_once(name, table.column_names)
    extra = require_columns(name, table.column_names, schema)
    wanted, columns, bad = arrow_schema(schema), dict[str, pa.ChunkedArray](), set[int]()
    for target in wanted:
        column = _plain(table.column(target.name))
        if column.null_count == len(column):
            # A column of nulls has no reliable type: pandas stores it as floats.
            columns[target.name] = pa.chunked_array([pa.nulls(len(column), target.type)])
            continue
        _require_kind(name, target.name, column.type, target.type)
        columns[target.name], misfits = _fitting(column, target.type)
        bad.update(misfits)
    count = table.num_rows
    raw, reason = [None] * count, [None] * count
    places = pa.array(sorted(bad), pa.int64())
    for place in places.to_pylist():
        row = {c: _shown(table.column(c)[place]) for c in table.column_names}
        raw[place], reason[place] = json.dumps(row, default=str), Reason.UNREADABLE
    columns[ROW] = pa.array(range(1, count + 1), pa.int64())
    columns[RAW], columns[REASON] = pa.array(raw, pa.string()), pa.array(reason, pa.string())
    return LocalFrame(pa.table(columns), extra)


def _shown(value: pa.Scalar) -> Any:
    """Returns a value for the quarantine, as text if it has a time that Python does not have."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return pa.array([value], value.type).to_string(skip_new_lines=True)


def require_columns(name: str, there: Sequence[str], schema: StructType) -> list[str]:
    """Returns the columns of a DataFrame that the schema lacks.

    Raises:
        ContractError: the DataFrame lacks columns of the schema.
    """
    missing = [c for c in schema.names if c not in there]
    if missing:
        raise ContractError(
            f"{name}: expected a DataFrame with the columns {schema.names}, got {list(there)}, without "
            f"{missing}; return them, or remove them from the schema. Nothing was committed"
        )
    return [c for c in there if c not in schema.names]


def require_once(name: str, there: Sequence[str]) -> None:
    """Checks that a DataFrame has each column once.

    Raises:
        ContractError: a column occurs twice.
    """
    twice = sorted({c for c in there if there.count(c) > 1})
    if twice:
        raise ContractError(
            f"{name}: expected a DataFrame with each column once, got the columns {twice} more than "
            "once; rename or drop them before it is returned. Nothing was committed"
        )


def wrong_type(name: str, column: str, got: object, wanted: object) -> ContractError:
    """Returns the error for a column that cannot be converted exactly."""
    return ContractError(
        f"{name}: column {column!r} is {got}, expected {wanted}; convert it before it is returned, or "
        "change the schema. Nothing was committed"
    )


def _as_arrow(name: str, value: Any) -> pa.Table | None:
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, pa.RecordBatchReader):
        return value.read_all()
    if library in ("polars", "pandas"):
        value = value.collect() if hasattr(value, "collect") else value
        if not hasattr(value, "columns"):
            return None
        require_once(name, [*map(str, value.columns)])
        try:
            if library == "polars":
                return value.to_arrow()
            table = pa.Table.from_pandas(value, preserve_index=False)
            _require_dates(value, table)
            return table
        except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
            raise ContractError(
                f"{name}: expected {library} columns that convert to a type of Arrow, got: "
                f"{error}; convert that column before it is returned. Nothing was committed"
            ) from None
    if library in ("duckdb", "_duckdb"):
        return value.to_arrow_table() if hasattr(value, "to_arrow_table") else None
    return None


def _require_dates(value: Any, table: pa.Table) -> None:
    """Raises if a pandas column of objects has dates and times: Arrow takes a column that begins with a
    date for one of dates, and leaves out the times."""
    for place, f in enumerate(table.schema):
        objects = value.iloc[:, place] if "date32" in str(f.type) else None
        if objects is not None and objects.dtype == object and any(map(_has_time, objects)):
            raise pa.ArrowInvalid(f"dates and times in the column {f.name!r}")


def _has_time(value: Any) -> bool:
    """Returns whether a value, or a value within it, is a time that is not midnight."""
    if isinstance(value, datetime):
        return value == value and value.time() != datetime.min.time()  # pandas' NaT is not itself
    if isinstance(value, dict):
        return any(map(_has_time, cast("dict[Any, Any]", value).values()))
    is_list = isinstance(value, list | tuple) or bool(getattr(value, "ndim", 0))  # or NumPy's array
    return is_list and any(map(_has_time, cast(Any, value)))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column without dictionary encoding (pandas categories)."""
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def _kind(kind: pa.DataType) -> str:
    return next((name for name, is_one in _KINDS if is_one(kind)), str(kind))


def _require_kind(name: str, column: str, got: pa.DataType, wanted: pa.DataType) -> None:
    if _are_alike(got, wanted):
        try:
            pa.array([], got).cast(wanted)
            return
        except pa.ArrowException:
            pass
    raise wrong_type(name, column, got, wanted)


def _are_alike(got: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether values of one type may be values of the other, at any depth, fields of structs by
    name. Arrow would read integers as times, numbers as truth values, fields of other names as null,
    and local times in a zone as UTC."""
    if pa.types.is_null(got):
        return True
    if pa.types.is_dictionary(got):
        return _are_alike(got.value_type, wanted)
    if pa.types.is_struct(got) and pa.types.is_struct(wanted):
        there = {f.name: f.type for f in got}
        both = [f for f in wanted if f.name in there]
        lowered = {name.lower() for name in there}
        other_case = any(f.name.lower() in lowered for f in wanted if f.name not in there)
        return bool(both) and not other_case and all(_are_alike(there[f.name], f.type) for f in both)
    if pa.types.is_map(got) and pa.types.is_map(wanted):
        keys = _are_alike(got.key_type, wanted.key_type)
        return keys and _are_alike(got.item_type, wanted.item_type)
    if _kind(got) == _kind(wanted) == "list":
        return _are_alike(got.value_type, wanted.value_type)
    if pa.types.is_timestamp(got) and pa.types.is_timestamp(wanted):
        return got.tz is None or wanted.tz is not None
    return _kind(got) in {_kind(wanted), *_ALSO.get(_kind(wanted), ())}


def _fitting(column: pa.ChunkedArray, wanted: pa.DataType) -> tuple[pa.ChunkedArray, list[int]]:
    """Returns the column in another type, with null for values that do not fit, and their positions.

    Arrow's cast fails as a whole, so bisection finds the misfits.
    """
    try:
        return _cast(column, wanted), []
    except pa.ArrowException:
        if len(column) == 1:
            return pa.chunked_array([pa.nulls(1, wanted)]), [0]
    half = len(column) // 2
    parts = [column.slice(0, half), column.slice(half)]
    if pa.types.is_nested(wanted):  # a slice has the elements of all rows, which are cast too
        parts = [part.take(pa.array(range(len(part)), pa.int64())) for part in parts]
    (first, bad), (second, more) = (_fitting(part, wanted) for part in parts)
    return pa.chunked_array([*first.chunks, *second.chunks], wanted), [*bad, *(half + p for p in more)]


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Casts a column; raises if a value would change."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(wanted):
        column = column.cast(_WIDEST)  # else Arrow checks the digits of the type, not of the value
    done = column.cast(wanted)
    loses = _kind(wanted) in ("float", "integer", "time", "list", "struct", "map")
    if loses and _loses(column.combine_chunks(), done.combine_chunks()):
        raise pa.ArrowInvalid("the type does not have the value")
    return done


def _loses(before: pa.Array, after: pa.Array) -> bool:
    """Returns whether a cast, or pandas before it, may have rounded a number, or has left out the time
    of a day, or Spark cannot have the value: a time outside the years 1 to 9999, a map with a key
    twice. Arrow's cast checks none of these."""
    kind = after.type
    if pa.types.is_struct(kind):
        both = [f.name for f in kind if before.type.get_field_index(f.name) >= 0]
        return any(_loses(pc.struct_field(before, n), pc.struct_field(after, n)) for n in both)
    if pa.types.is_map(kind):
        # The keys of a slice are those of all rows, unless it is copied.
        whole = pa.array(range(len(after)), pa.int64())
        first, second = before.take(whole), after.take(whole)
        if _loses(first.keys, second.keys) or _loses(first.items, second.items):
            return True
        return any(len({repr(k) for k, _ in row}) < len(row) for row in after.to_pylist() if row)
    if _kind(kind) == "list":
        return _loses(before.flatten(), after.flatten())
    if kind == pa.float32() and before.type == pa.float64():
        return _rounds(before, after)
    if pa.types.is_integer(kind) and before.type in _EXACT:
        # A larger one may have been another integer: pandas stores integers with a null as floats.
        size = pc.abs(before.cast(pa.float64()))
        return pc.any(pc.greater_equal(size, float(_EXACT[before.type]))).as_py() is True
    if _kind(kind) == "time":
        whole = after.cast(pa.int32() if kind == pa.date32() else pa.int64())
        bounds = pc.min_max(whole).as_py().values()
        unit = DAY if kind == pa.date32() else 1
        first, last = FIRST_TIME // unit, LAST_TIME // unit
        inside = all(one is None or first <= one <= last for one in bounds)
        return not inside or (pa.types.is_date(kind) and not after.cast(before.type).equals(before))
    return False


_EXACT = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""The integer from which on a float does not have every integer."""


def _rounds(before: pa.Array, after: pa.Array) -> bool:
    """Returns whether a DOUBLE is too large or too small for a FLOAT, or a whole number that FLOAT does
    not have. For other numbers the nearest FLOAT is accepted, as for a text: neither type has exactly
    0.1."""
    near = after.cast(pa.float64())
    changed = pc.and_(pc.not_equal(near, before), pc.invert(pc.is_nan(before)))
    none = pc.or_(pc.is_inf(near), pc.or_(pc.equal(near, 0), pc.equal(pc.floor(before), before)))
    return pc.any(pc.and_(changed, none)).as_py() is True


# Conversion to Spark


_WHOLE = ("tinyint", "smallint", "int", "bigint")
_WIDER = {
    ("float", "double"),
    *((kind, "double") for kind in _WHOLE[:3]),
    *((kind, wider) for place, kind in enumerate(_WHOLE) for wider in _WHOLE[place + 1 :]),
    ("date", "timestamp"),
    ("timestamp_ntz", "timestamp"),
}
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}


class SparkFrame:
    """The rows of a Spark DataFrame, persisted so that they are computed once."""

    def __init__(self, rows: DataFrame, extra: Sequence[str]) -> None:
        self._rows, self.extra = rows.persist(), extra
        self.count = self._rows.count()

    def digest(self) -> str:
        """Returns a digest of the rows, independent of their order."""
        row = as_json(self._rows.columns, nulls=True)
        hashed = F.xxhash64(row)
        sums = self._rows.agg(
            F.coalesce(F.bit_xor(hashed), F.lit(0)),
            F.coalesce(F.sum(hashed.cast("decimal(38,0)")), F.lit(0)),
        ).collect()[0]
        return f"{self.count}:{sums[0]}:{int(sums[1])}"

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns the rows with ``_row``, ``_raw`` and ``_reason``."""
        rows = self._rows
        broken = is_no_text(F.struct(*rows.columns), rows.schema)
        return rows.select(
            *[F.when(~broken, F.col(c)).alias(c) for c in rows.columns],
            F.lit(None).cast("bigint").alias(ROW),
            F.lit(None).cast("string").alias(RAW),
            F.when(broken, Reason.UNREADABLE).alias(REASON),
        )

    def release(self) -> None:
        """Unpersists the rows."""
        self._rows.unpersist()


Frame: TypeAlias = LocalFrame | SparkFrame
"""A DataFrame with the columns of a schema."""


def frame_of(node: Stream, value: Any) -> Frame | None:
    """Returns a value as a DataFrame with the columns and types of a node; None = no rows, or None.

    Raises:
        ContractError: the value is not a DataFrame, lacks a column, or has a column of another type.
    """
    if value is None:
        return None
    name, schema = node.name, cast(StructType, node.schema)
    found: Frame | None = local_frame(name, value, schema)
    if found is None:
        if not (hasattr(value, "schema") and hasattr(value, "sparkSession")):
            raise ContractError(
                f"{name}: expected a DataFrame of Spark, pandas, Polars, Arrow or DuckDB, or None, got "
                f"{type(value).__module__}.{type(value).__qualname__}; return one of these"
            )
        there = cast(DataFrame, value)
        extra = require_columns(name, there.columns, schema)
        kinds = {f.name: f.dataType for f in there.schema.fields}
        for f in schema.fields:
            if differences(kinds[f.name], f.dataType, f.name, fits=_fits):
                got, wanted = kinds[f.name].simpleString(), f.dataType.simpleString()
                raise wrong_type(name, f.name, got, wanted)
        columns = [
            # The cast changes only which fields may be null: the declared ones.
            by_name(F.col(f"`{f.name}`"), kinds[f.name], f.dataType).cast(f.dataType).alias(f.name)
            for f in schema.fields
        ]
        found = SparkFrame(there.select(*columns), extra)
    if found.count:
        return found
    found.release()
    return None


def _fits(got: DataType, wanted: DataType) -> bool:
    """Returns whether every value of ``got`` is a value of ``wanted``."""
    one, other = got.simpleString(), wanted.simpleString()
    if one in (other, "void") or (one, other) in _WIDER:
        return True
    if not isinstance(wanted, DecimalType):
        return False
    room = wanted.precision - wanted.scale
    if isinstance(got, DecimalType):
        return got.scale <= wanted.scale and got.precision - got.scale <= room
    return _DIGITS.get(one, room + 1) <= room


# Frame sources


_DELIVERIES = "deliveries"
"""Key of the deliveries in the consumed state of a source."""
_DELIVERY = "_delivery"
_MOST_RUNS = 1_000
"""Number of runs kept in the consumed state: a retry comes soon after its run."""
_NAMED = 20
"""Number of deliveries of a run that its commit names."""


@dataclass(frozen=True)
class Delivery:
    """A DataFrame that is consumed once.

    Args:
        name: a partition, a run, or ``""`` for the whole of an upstream asset.
        version: the version under this name; a consumed version is not loaded again. None = the digest
            of its content.
        load: returns the DataFrame.
        replaced_by: returns the versions that have replaced this one.
        run: the run that consumes it, the first one of a chain of retries; "" = unknown.
        is_retry: takes the batch and the run of a consumed delivery with this name; returns whether
            that is this delivery, which then is not loaded again.
    """

    name: str
    version: str | None
    load: Callable[[], Any]
    replaced_by: Callable[[], Collection[str]] = frozenset
    run: str = ""
    is_retry: Callable[[int, str], bool] = lambda batch, run: False


@dataclass(frozen=True, kw_only=True)
class FrameSource(Repeatable):
    """The base of sources of DataFrames. A run of the asset provides the deliveries.

    Args:
        partitions_def: the Dagster partitions definition of the asset; each run consumes the delivery
            of its partition.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be.
    """

    partitions_def: Any = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)

    gives_timestamp = False

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        require_limits(self.max_bad_share, self.max_clock_skew)

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks nothing: missing columns of a DataFrame show when it is loaded."""

    @property
    def input(self) -> str:
        """The name of the source in a commit's ``inputs``; its offsets count rows."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        raise NotImplementedError

    def pin(self, before: Commit | None, **run_config: Any) -> PinnedFrames:
        """Fails: only a run of the asset has the deliveries.

        Raises:
            SourceError: always.
        """
        raise SourceError(
            f"expected a run of the asset in Dagster, which provides {self.describe()}; got none. To "
            "rebuild its table, declare it under another name and materialize that asset"
        )


@dataclass(frozen=True, kw_only=True)
class AssetSource(FrameSource):
    """An upstream asset of this Dagster deployment as a source: each materialization is consumed once.

    The upstream asset is an ordinary input: its own IO manager loads the value, a DataFrame of Spark,
    pandas, Polars, Arrow or DuckDB. The commit records the consumed materialization; a run without a
    newer one commits nothing. All rows of a new materialization are new records, even rows that the
    previous one had. A materialization that is replaced before a run consumes it is skipped. An asset
    of another code location needs a ``dagster.AssetSpec`` in this one.

    If the upstream asset has partitions:

    - with the same ``partitions_def`` here, a run consumes the materialization of its partition;
    - without, a run consumes each partition materialized since it was last consumed, in order of
      partition key. Dagster then loads all partitions each time.

    Args:
        key: the key of the upstream asset: ``"rates"``, ``"shop/rates"`` or its parts.
        as_type: the class to load, like a type annotation of an input; None = the IO manager's choice.
            A dict of such values by partition is accepted too, which Dagster's file IO managers return
            for a run of several partitions.
        input_manager_key: the IO manager that loads the value; None = the one that stored it.
        metadata: the metadata of the input, for the IO manager.
        partition_mapping: the mapping of upstream partitions to a run; None = Dagster's default.
    """

    key: str | Sequence[str] = field(kw_only=False)
    as_type: Any = None
    input_manager_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    partition_mapping: Any = None

    @property
    def path(self) -> tuple[str, ...]:
        """The parts of the upstream asset's key, split at ``/``."""
        return tuple(self.key.split("/") if isinstance(self.key, str) else self.key)

    @property
    def input(self) -> str:
        return f"asset {'/'.join(self.path)}"

    def describe(self) -> str:
        return f"materializations of the asset {'/'.join(self.path)}"


@dataclass(frozen=True, kw_only=True)
class FunctionSource(FrameSource):
    """The result of a decorated function as a source; see ``versioned_table``.

    Args:
        function: the user's function.
        ins: Dagster's ``AssetIn`` by parameter name, where one is needed.
        deps: further upstream assets.
        required_resource_keys: the resources that the function reads from its context.
    """

    function: Callable[..., Any]
    ins: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    deps: Sequence[Any] = ()
    required_resource_keys: frozenset[str] = frozenset()

    @property
    def input(self) -> str:
        return "function"

    def describe(self) -> str:
        where = getattr(self.function, "__module__", "")
        return f"what {where}.{getattr(self.function, '__qualname__', self.function)} returns"


@dataclass(frozen=True)
class Given:
    """The deliveries of one run, as a source to pin.

    Args:
        node: the stream or table.
        source: the declared source.
        deliveries: the candidates of this run, in order.
        again: whether a consumed partition with changed rows is consumed again, see :meth:`pin`.
    """

    node: Stream
    source: FrameSource
    deliveries: Sequence[Delivery]
    again: bool = False
    _loaded: dict[str, Frame | None] = field(default_factory=dict[str, "Frame | None"], init=False)

    def pin(self, before: Commit | None, *, consumed: Mapping[str, Any] = {}) -> PinnedFrames:
        """Loads and pins the unconsumed deliveries. Uses Spark only for Spark's DataFrames.

        Raises:
            SourceError: the rows of a consumed partition have changed, and ``again`` is not set.
            ContractError: see :func:`frame_of`.
        """
        memory: Mapping[str, Any] = consumed.get(_DELIVERIES, {})
        new: list[tuple[Delivery, Frame, str]] = []
        for one in self.deliveries:
            known = memory.get(one.name)
            if known is not None and (known[0] == one.version or known[0] in one.replaced_by()):
                continue
            if known is not None and len(known) > 3 and one.is_retry(*known[2:4]):
                continue
            found = self._frame(one)
            if found is None:
                continue
            version = one.version
            if version is None:
                version = found.digest()
                if known is not None and known[0] == version:
                    continue
                if known is not None and not self.again:
                    raise self._changed(one.name, known, found)
            new.append((one, found, version))
        first = 0 if before is None else before.inputs.get(self.source.input, {}).get(0, 0)
        batch = 1 if before is None else before.batch + 1
        return PinnedFrames(self.source, new, consumed, first, batch)

    def _frame(self, one: Delivery) -> Frame | None:
        if one.name not in self._loaded:
            self._loaded[one.name] = frame_of(self.node, one.load())
        return self._loaded[one.name]

    def _changed(self, name: str, known: Sequence[Any], found: Frame) -> SourceError:
        return SourceError(
            f"{self.node.name}: expected the rows of partition {name} as consumed by an earlier run "
            f"({counted(known[1], 'row')}), got other rows ({found.count:,}); nothing was committed. A "
            "partition is consumed once. To add these rows as new records (a row of the same key and "
            "time replaces the old one, others are kept), run with the tag vt_dagster/take_again = true"
        )

    def release(self) -> None:
        """Releases the loaded DataFrames."""
        for found in self._loaded.values():
            if found is not None:
                found.release()


def batch_of_delivery(consumed: Mapping[str, Any], name: str) -> int:
    """Returns the batch that consumed a delivery last; 0 = none, or an earlier release consumed it
    without storing the batch."""
    found = consumed.get(_DELIVERIES, {}).get(name, ())
    return found[2] if len(found) > 2 else 0


@dataclass(frozen=True)
class PinnedFrames(Limited):
    """The deliveries that a run consumes.

    Args:
        source: the declared source.
        new: each delivery with its rows and the version to store.
        before: the consumed state of earlier runs.
        first: the number of rows consumed by earlier runs.
        batch: the number of the run's commit.
    """

    source: FrameSource
    new: Sequence[tuple[Delivery, Frame, str]]
    before: Mapping[str, Any]
    first: int
    batch: int

    bytes = None

    @property
    def rows(self) -> int:
        """The number of rows of all deliveries."""
        return sum(found.count for _, found, _ in self.new)

    @property
    def taken(self) -> Ranges:
        return {self.source.input: {0: (self.first, self.first + self.rows)}} if self.new else {}

    @property
    def empty(self) -> bool:
        return not self.new

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns the rows of all deliveries in order; within a delivery by timestamp, then by row
        number of a local DataFrame, or by key and content of a Spark DataFrame, which has no order.

        Plan: up to ``CHUNK`` rows are sorted by one task; more by a range shuffle.
        """
        parts = [
            found.frame(spark).withColumns({_DELIVERY: F.lit(place), SOURCE: F.lit(one.name)})
            for place, (one, found, _) in enumerate(self.new)
        ]
        rows = reduce(DataFrame.unionByName, parts)
        content = as_json(node.schema.names)
        of_spark = [F.when(F.col(ROW).isNull(), F.col(f"`{c}`")) for c in node.key]
        of_spark.append(F.when(F.col(ROW).isNull(), content))
        order = [F.col(_DELIVERY), time_of(node, rows), F.col(ROW), *of_spark]
        few = self.rows <= CHUNK
        rows = rows.coalesce(1).sortWithinPartitions(*order) if few else rows.orderBy(*order)
        return rows.select(
            *node.schema.names,
            F.monotonically_increasing_id().alias(ARRIVAL),
            SOURCE,
            F.coalesce(F.col(ROW), F.monotonically_increasing_id() + 1).alias(POSITION),
            F.coalesce(RAW, content).alias(RAW),
            REASON,
        )

    def consumed(self) -> dict[str, Any]:
        """Returns the consumed state after the run: version, rows, batch and run by delivery."""
        memory = dict(self.before.get(_DELIVERIES, {}))
        for one, found, version in self.new:
            memory[one.name] = [version, found.count, self.batch, one.run]
        runs = [name for name, (version, *_) in memory.items() if name and not version]
        for name in runs[:-_MOST_RUNS]:
            del memory[name]
        return {**self.before, _DELIVERIES: memory}

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        ends = {n: {p: end for p, (_, end) in some.items()} for n, some in self.taken.items()}
        named = {one.name: version for one, _, version in self.new[:_NAMED]}
        return {"taken": self.taken, "inputs": ends, "files": True, "deliveries": named}

    def describe(self, schema: StructType) -> list[str]:
        lines = [
            f"takes {counted(found.count, 'row')} of {self.source.describe()}"
            f"{f': {one.name}' if one.name else ''}"
            for one, found, _ in self.new
        ]
        extra = sorted({column for _, found, _ in self.new for column in found.extra})
        if extra:
            lines.append(f"!left out columns that the schema lacks: {', '.join(extra)}")
        return lines

    def explain(self, error: Exception) -> None:
        return None
