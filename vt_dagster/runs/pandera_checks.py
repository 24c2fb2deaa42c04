"""Runs pandera checks as conditions that one pass counts, and compares columns and their types.

pandera's own ``validate`` runs a Spark job per check. Most checks have one shape, though: *no row
passes this filter*, perhaps over columns that the check adds first. This module records each check's
filter and added columns, and counts all of them in a single aggregate. A check of any other shape runs
as pandera runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, NullType, StructType

from vt_dagster.columns import IS_TOMBSTONE
from vt_dagster.core.arrival_order import with_columns
from vt_dagster.errors import ContractError
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import same


@dataclass(frozen=True)
class Rule:
    """An invariant of rows: its name, the condition of an offending row, and further ``columns`` that
    the condition needs, by name."""

    name: str
    violated: Column
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])


@dataclass(frozen=True)
class Probe:
    """A check that has no condition: a function of the DataFrame that must return true."""

    name: str
    holds: Callable[[DataFrame], bool]


class _Recorder:
    """Replaces a DataFrame and records the filter that a check applies."""

    def __init__(self, rows: int, columns: Sequence[str]) -> None:
        self.rows = rows
        self.columns = list(columns)
        self.conditions: list[Any] = []
        self.added = dict[str, Column]()

    def withColumns(self, added: Mapping[str, Column]) -> _Recorder:
        self.added.update(added)
        return self

    def withColumn(self, name: str, column: Column) -> _Recorder:
        return self.withColumns({name: column})

    def filter(self, condition: Any) -> _Recorder:
        self.conditions.append(condition)
        return self

    where = filter

    def limit(self, _: int) -> _Recorder:
        return self

    def count(self) -> int:
        return self.rows

    def isEmpty(self) -> bool:
        return self.rows == 0


def rule_of(name: str, check: Callable[[Any], Any], columns: Sequence[str]) -> Rule | None:
    """Returns a check as a rule, if it passes exactly when its filter returns no row; else None.

    Args:
        columns: the columns of the DataFrame to check.
    """
    empty, full = _Recorder(0, columns), _Recorder(1, columns)
    try:
        shaped = bool(check(empty)) and not bool(check(full))
    except Exception:
        return None
    if not shaped or len(empty.conditions) != 1:
        return None
    condition = empty.conditions[0]
    violated = F.expr(condition) if isinstance(condition, str) else condition
    return Rule(name, violated, empty.added)


def with_columns_of(frame: DataFrame, rules: Sequence[Rule]) -> DataFrame:
    """Returns the DataFrame with the columns that the rules' conditions need."""
    added = {name: column for rule in rules for name, column in rule.columns.items()}
    return with_columns(frame, added)


def contract_of(node: Stream, columns: Sequence[str] = ()) -> tuple[list[Rule], list[Probe]]:
    """Returns the checks of the node's pandera model, for records that are about to be committed.

    Not-null columns and checks apply to records with a value: a tombstone needs only its key. Needs a
    running Spark session.

    Args:
        columns: the records' columns besides those of the schema.
    """
    if not hasattr(node.contract, "to_schema"):
        return [], []
    schema = node.contract.to_schema()
    rules: list[Rule] = []
    probes: list[Probe] = []

    def add(name: str, check: Callable[[Any], Any]) -> None:
        found = rule_of(name, check, [*node.schema.names, *columns])
        if found is None:
            probes.append(Probe(name, check))
        elif found.columns:
            # A window must not mix applied rows with rejected ones or tombstones: filter first.
            probes.append(Probe(name, lambda rows: bool(check(rows.where(~F.col(IS_TOMBSTONE))))))
        else:
            rules.append(Rule(name, found.violated & ~F.col(IS_TOMBSTONE)))

    taken = set[str]()
    for column, declared in schema.columns.items():
        if not declared.nullable:
            present = F.col(column).isNull()
            value = column in node.value_columns
            rules.append(
                Rule(f"{column}_not_null", present & ~F.col(IS_TOMBSTONE) if value else present)
            )
        for check in declared.checks:
            add(check_name(check, column, taken), on_column(check, column))
    for check in schema.checks:
        add(check.name or str(check.error), on_frame(check))
    return rules, probes


def check_name(check: Any, column: str, taken: set[str]) -> str:
    """Returns the name that the user gave a check; without one, its column and its error text."""
    said = str(check.error)
    given = check.name and said.split("(")[0] != check.name
    name = check.name if given and check.name not in taken else f"{column} {said}"
    taken.add(name)
    return name


def on_column(check: Any, column: str) -> Callable[[Any], Any]:
    """Returns a check of a column as a function of the whole DataFrame."""
    # Importing pandera takes half a second: nodes without a contract must not wait for it.
    from pandera.api.pyspark.types import PysparkDataframeColumnObject

    def run(frame: Any) -> Any:
        on = PysparkDataframeColumnObject(frame, column)
        return _function_of(check, PysparkDataframeColumnObject)(on, **check._check_kwargs)

    return run


def on_frame(check: Any) -> Callable[[Any], Any]:
    """Returns the function that a check of a DataFrame calls."""
    return lambda frame: check._check_fn(frame, **check._check_kwargs)


def _function_of(check: Any, of: type) -> Callable[..., Any]:
    """Returns the function that a check calls.

    A schema copies the registry of pandera's own checks at construction, which may be before the
    PySpark checks were imported: they are then looked up anew.
    """
    function = check._check_fn
    known = getattr(function, "_function_registry", None)
    if known is None or of in known:
        return function
    import pandera.backends.pyspark.builtin_checks  # noqa: F401  # registers them
    from pandera.api.checks import Check

    registered: Any = Check.CHECK_FUNCTION_REGISTRY
    return registered[function._name]


def dtype_of(kind: DataType) -> Any:
    """Returns pandera's type of a column; None = unknown to pandera (STRUCT, VOID, ...)."""
    from pandera.engines.pyspark_engine import Engine

    try:
        Engine.dtype(kind)
    except TypeError:
        return None
    return kind


def misfits(frame: DataFrame, wanted: StructType, more: tuple[str, ...] = ()) -> list[str]:
    """Returns missing columns and wrong types of a DataFrame, by pandera. Runs no Spark job.

    Args:
        wanted: columns with their types; VOID = any type.
        more: further columns, of any type.
    """
    # Importing pandera takes half a second: loading definitions must not wait for it.
    import pandera.pyspark as pa
    from pandera.config import ValidationDepth, config_context

    types = dict.fromkeys((*wanted.names, *more))
    types |= {f.name: dtype_of(f.dataType) for f in wanted.fields}
    # The gate counts nulls, in its one pass.
    columns = {n: pa.Column(kind, name=n, nullable=True) for n, kind in types.items()}
    schema = pa.DataFrameSchema(columns)
    # An empty frame: pandera would read the rows of a frame that lacks a column.
    nothing = frame.sparkSession.createDataFrame([], frame.schema)
    with config_context(validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_ONLY):
        checked: Any = schema.validate(nothing)
    found = checked.pandera.errors.get("SCHEMA", {})
    there = {f.name: f.dataType for f in frame.schema.fields}
    lacking = [n for n in columns if n not in there]
    wrong = {e["column"] for some in found.values() for e in some}
    problems = [f"lacks {name}" for name in lacking]
    for f in wanted.fields:
        unknown = dtype_of(f.dataType) is None and not isinstance(f.dataType, NullType)
        if f.name in there and (f.name in wrong or unknown) and not same(there[f.name], f.dataType):
            problems.append(
                f"{f.name} is {there[f.name].simpleString()}, expected {f.dataType.simpleString()}"
            )
    return problems


def refuse(node: Stream, broken: dict[str, int], rows: DataFrame, rules: list[Rule]) -> None:
    """Stops a run before its commit if records break their contract.

    Args:
        broken: number of offending records by rule; empty = the run goes on.

    Raises:
        ContractError: names the rules, how many records break each, and one of them.
    """
    if not broken:
        return
    lines: list[str] = []
    for name, count in sorted(broken.items()):
        example = ""
        for rule in rules:
            if rule.name == name:
                # Spark Connect has no toJSON.
                text = F.to_json(F.struct(*[F.col(f"`{c}`") for c in node.schema.names]))
                found = with_columns_of(rows, [rule]).where(rule.violated).select(text).first()
                example = f", for example {found[0]}" if found else ""
        lines.append(f"{name}: {count if count >= 0 else 'some'} record(s){example}")
    raise ContractError(
        f"{node.name}: expected records that satisfy their schema, got some that break it; nothing "
        f"was committed. {'; '.join(lines)}. Fix the input, or the rule in the schema, and run again"
    )
