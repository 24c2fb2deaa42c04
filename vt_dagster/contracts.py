"""Invariants of streams, tables and versioned tables as pandera checks and schemas on PySpark.

The checks work on any Spark DataFrame with validity intervals: the library's own tables, dbt snapshots,
slowly changing dimensions from any other writer. Call a check in a ``@pa.dataframe_check`` of your own
model, or name it: importing this module registers all checks with pandera, so that a model's ``Config``
accepts ``versions_do_not_overlap = {"key": ["id"]}``, and ``pandera.Check`` has them as methods.

``contract(node)`` returns the whole contract of one of the library's tables as a pandera schema. Gates,
asset checks and the command line count the same conditions, many in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandera.pyspark as pa
from pandera.api.extensions import register_check_method
from pandera.engines.pyspark_engine import Engine
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from vt_dagster.columns import IS_TOMBSTONE, VALID_FROM, VALID_TO
from vt_dagster.core.log_columns import log_schema, value_columns, view_schema
from vt_dagster.runs.gate import (
    CHECKS,
    check_name,
    invariants_of_log,
    invariants_of_view,
    nothing_older_than_retention,
    of_model,
    on_column,
    on_frame,
    one_current_version_per_key,
    one_result_per_window,
    one_row_per_key,
    one_version_per_key_and_timestamp,
    timestamps_do_not_decrease,
    valid_from_before_valid_to,
    versions_are_contiguous,
    versions_do_not_overlap,
)
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import pandera_schema

__all__ = [
    "contract",
    "nothing_older_than_retention",
    "one_current_version_per_key",
    "one_result_per_window",
    "one_row_per_key",
    "one_version_per_key_and_timestamp",
    "timestamps_do_not_decrease",
    "valid_from_before_valid_to",
    "versions_are_contiguous",
    "versions_do_not_overlap",
]


def _register() -> None:
    for name, check in CHECKS.items():
        if name not in pa.Check.REGISTERED_CUSTOM_CHECKS:
            code = check.__code__
            of_keywords = slice(code.co_argcount, code.co_argcount + code.co_kwonlyargcount)
            parameters = [*code.co_varnames[of_keywords]]
            register_check_method(check, statistics=parameters, supported_types=[DataFrame])


_register()


def contract(node: Stream) -> pa.DataFrameSchema:
    """Returns a pandera schema that validates any DataFrame with the rows of a stream or table.

    The DataFrame may come from the library or from another writer that uses the same columns: a table
    that Trino or dbt filled, an export, a copy.

    The rows of a versioned table are its versions: key and value columns, ``valid_from`` (TIMESTAMP,
    inclusive) and ``valid_to`` (TIMESTAMP, exclusive, null = current). The rows of another table are
    its current rows; the rows of a stream or a join's result are the rows of its log. Both have
    ``timestamp``. The columns that only the library adds (``partition``, ``offset``, ``is_tombstone``,
    ...) may be missing.

    The schema has the columns with their types, the not-null columns and checks of the node's own
    pandera model, and the invariants. Checks of values skip tombstones, which have no values. Checks of
    order and late rows need their columns in the frame: ``timestamps_do_not_decrease`` needs
    ``offset``.

    Returns:
        a ``pandera.pyspark.DataFrameSchema``: ``contract(node).validate(df).pandera.errors`` is empty
        if all checks pass. pandera runs one Spark job per check.
    """
    if isinstance(node, VersionedTable):
        columns, needed = view_schema(node), {VALID_FROM, VALID_TO}
    else:
        columns, needed = (view_schema(node) if isinstance(node, Table) else log_schema(node)), set()
    own = set(node.schema.names)
    made = {
        f.name: pa.Column(
            _dtype_of(f.dataType),
            nullable=f.name not in node.key and f.name != VALID_FROM,
            required=f.name in own or f.name in needed,
            name=f.name,
        )
        for f in columns.fields
    }
    # A table's rows come from its view: the invariants of the log do not apply to them.
    invariants = invariants_of_view(node) if isinstance(node, Table) else invariants_of_log(node)
    rules = [*_of_values(node)]
    rules += [getattr(pa.Check, name)(**given) for name, given in invariants.items()]
    return pa.DataFrameSchema(made, checks=rules, name=node.name)


def _dtype_of(kind: DataType) -> Any:
    """Returns pandera's type of a column; None = unknown to pandera (STRUCT, VOID, ...)."""
    try:
        Engine.dtype(kind)
    except TypeError:
        return None
    return kind


def _of_values(node: Stream) -> list[pa.Check]:
    """Returns the node's own pandera checks and not-null columns, for rows that are no tombstones."""
    schema = pandera_schema(node.contract)
    if schema is None:
        return []
    found: list[pa.Check] = []
    taken = set[str]()
    for name, declared in schema.columns.items():
        if not declared.nullable and name in value_columns(node):
            taken.add(absent := f"{name}_not_null")
            found.append(pa.Check(_with_value(node, _present(name)), name=absent))
        for check in declared.checks:
            label = check_name(check, name, taken)
            run = _with_value(node, on_column(check, name, schema))
            found.append(pa.Check(run, name=label, raise_warning=check.raise_warning))
    for check in schema.checks:
        run, label = _with_value(node, on_frame(check)), check_name(check, "", taken)
        found.append(pa.Check(run, name=label, raise_warning=check.raise_warning))
    return found


def _present(column: str) -> Callable[[Any], bool]:
    return lambda frame: frame.filter(F.col(f"`{column}`").isNull()).limit(1).count() == 0


def _with_value(node: Stream, check: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def run(frame: DataFrame) -> bool:
        rows = frame.where(~F.col(IS_TOMBSTONE)) if IS_TOMBSTONE in frame.columns else frame
        return bool(check(of_model(node, rows)))

    return run
