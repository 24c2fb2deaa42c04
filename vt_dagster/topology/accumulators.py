"""Parses aggregates such as ``{"departures": "count(*)", "mean_delay": "avg(dep_delay)"}``.

An aggregate is stored as *accumulators*, each merged from record to record by sum, min or max; the
result columns are SQL expressions over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.schema import check_sql_name

Merge = Literal["sum", "min", "max"]

_CALL = re.compile(r"\s*(?P<function>[A-Za-z_]\w*)\s*\((?P<inside>.*)\)\s*", re.DOTALL)
_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_CONSTANTS = frozenset({"true", "false", "null", "current_date", "current_timestamp"})
_KNOWN = ("count", "sum", "min", "max", "avg", "mean")
_EXPECTED = (
    "write one call of count, sum, min, max, avg or mean over a column or SQL expression, "
    "for example 'count(*)' or 'sum(price * amount)'"
)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_NOT_NUMBERS = (
    BooleanType,
    BinaryType,
    DateType,
    TimestampType,
    TimestampNTZType,
    ArrayType,
    MapType,
    StructType,
)


@dataclass(frozen=True)
class Accumulator:
    """One stored value of a group.

    Args:
        name: its column; begins with ``_acc``.
        expression: SQL over a record's columns; null is ignored.
        merge: how two values are combined. As in SQL, null and x give x.
    """

    name: str
    expression: str
    merge: Merge


@dataclass(frozen=True)
class _Call:
    column: str
    function: str
    inside: str


@dataclass(frozen=True)
class Aggregates:
    """The result columns of an aggregate, and the accumulators they derive from.

    The sum over no values is 0, as in Kafka Streams; avg, min and max over no values are null.
    Identical accumulators are stored once.

    Args:
        asset: name of the result, for messages.
        declared: (column, aggregate) pairs, or a mapping.

    Attributes:
        columns: (name, SQL expression over the accumulators).
        accumulators: the stored values.

    Raises:
        TopologyError: an expression that is not a single aggregate call.
    """

    asset: str
    declared: Sequence[tuple[str, str]] | Mapping[str, str]
    columns: tuple[tuple[str, str], ...] = field(init=False)
    accumulators: tuple[Accumulator, ...] = field(init=False)

    def __post_init__(self) -> None:
        given = self.declared.items() if isinstance(self.declared, Mapping) else self.declared
        object.__setattr__(self, "declared", tuple((str(c), a) for c, a in given))
        if not self.declared:
            raise TopologyError(f"{self.asset}: expected aggregates, got none; {_EXPECTED}")
        kept: dict[tuple[str, Merge], Accumulator] = {}

        def keep(expression: str, merge: Merge) -> str:
            name = f"_acc{len(kept)}"
            return kept.setdefault((expression, merge), Accumulator(name, expression, merge)).name

        columns: list[tuple[str, str]] = []
        for call in self._calls():
            x = call.inside
            if call.function == "count":
                one = "CAST(1 AS BIGINT)" if x == "*" else f"CAST(({x}) IS NOT NULL AS BIGINT)"
                shown = f"coalesce({keep(one, 'sum')}, 0)"
            elif call.function == "sum":
                shown = f"coalesce({keep(x, 'sum')}, 0)"
            elif call.function == "avg":
                total = keep(f"CAST(({x}) AS DOUBLE)", "sum")
                shown = f"{total} / nullif({keep(f'CAST(({x}) IS NOT NULL AS BIGINT)', 'sum')}, 0)"
            else:
                shown = keep(x, "min" if call.function == "min" else "max")
            columns.append((call.column, shown))
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "accumulators", tuple(kept.values()))

    @property
    def invertible(self) -> bool:
        """Whether a record can be subtracted: every accumulator is a sum."""
        return all(a.merge == "sum" for a in self.accumulators)

    def fields(self, input: StructType) -> list[StructField]:
        """Returns the result columns with their types; NullType if only Spark can infer one.

        Args:
            input: schema of the aggregated records.

        Raises:
            TopologyError: a column that does not exist, or that cannot be summed or compared.
        """
        types = {f.name.lower(): f.dataType for f in input.fields}
        types.setdefault(TIMESTAMP, TimestampType())
        return [
            StructField(c.column, self._type(c, self._input_type(c, types, input.names)))
            for c in self._calls()
        ]

    def _calls(self) -> Iterator[_Call]:
        for column, aggregate in self.declared:
            yield self._parse(column, aggregate)

    def _parse(self, column: str, aggregate: object) -> _Call:
        call = _CALL.fullmatch(aggregate) if isinstance(aggregate, str) else None
        if call is None or not _is_one_expression(call["inside"]):
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, not an aggregate; {_EXPECTED}"
            )
        function, inside = call["function"].lower(), call["inside"].strip()
        if function not in _KNOWN:
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but {call['function']!r} has no "
                f"incremental update; {_EXPECTED}"
            )
        if inside == "*" and function != "count":
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but only count takes '*'; {_EXPECTED}"
            )
        if re.match(r"(distinct|all)\b", inside, re.IGNORECASE):
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but {inside.split()[0]!r} is not "
                f"supported, since distinct values would need unbounded state; {_EXPECTED}"
            )
        return _Call(column, "avg" if function == "mean" else function, inside)

    def _input_type(self, call: _Call, types: Mapping[str, DataType], names: Sequence[str]) -> DataType:
        check_sql_name(self.asset, call.inside, names)
        if not _COLUMN.fullmatch(call.inside) or call.inside.lower() in _CONSTANTS:
            return NullType()
        name = call.inside.strip("`").lower()
        if name not in types:
            raise TopologyError(
                f"{self.asset}: {call.column!r} is {call.function}({call.inside}), but there is no "
                f"column {call.inside!r}; name one of {list(names)}"
            )
        return types[name]

    def _type(self, call: _Call, of: DataType) -> DataType:
        wrong = (MapType,) if call.function in ("min", "max") else _NOT_NUMBERS
        if call.function != "count" and isinstance(of, wrong):
            raise TopologyError(
                f"{self.asset}: {call.column!r} is {call.function}({call.inside}), but {call.inside!r} "
                f"is {of.simpleString()}, a type without {call.function}; write an expression that "
                f"converts it to {'a number' if call.function in ('sum', 'avg') else 'another type'}"
            )
        if call.function == "count":
            return LongType()
        if call.function == "avg":
            return DoubleType()
        if call.function != "sum":
            return of
        if isinstance(of, _WHOLE):
            return LongType()
        if isinstance(of, FloatType | DoubleType):
            return DoubleType()
        if isinstance(of, DecimalType):
            return DecimalType(min(of.precision + 10, 38), of.scale)
        return NullType()


def _is_one_expression(text: str) -> bool:
    """Returns whether SQL text is one expression: not empty, balanced parentheses, no comma outside."""
    depth, quote, escaped = 0, "", False
    for c in text:
        if quote:
            if escaped:
                escaped = False
            elif c == "\\" and quote != "`":
                escaped = True
            elif c == quote:
                quote = ""
        elif c in "'\"`":
            quote = c
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
            if depth < 0:
                return False
        elif c == "," and depth == 0:
            return False
    return bool(text.strip()) and depth == 0 and not quote
