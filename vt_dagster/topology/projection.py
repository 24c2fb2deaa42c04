"""The selected columns of an operator's result, checked when the operator is made.

A join selects ``left.*``, ``right.column`` or ``expression as name``; an operator with one input ``*``,
``column`` or ``expression as name``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructField,
    TimestampType,
)

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.schema import check_sql_name, is_sql_name

_REFERENCE = re.compile(r"\b(left|right)\s*\.\s*(`[^`]+`|\w+|\*)", re.IGNORECASE)
_COLUMN = re.compile(r"\s*(left|right)\s*\.\s*(`[^`]+`|\w+)\s*", re.IGNORECASE)
_WHOLE = re.compile(r"\s*(left|right)\s*\.\s*(.+?)\s*", re.IGNORECASE | re.DOTALL)
_STAR = re.compile(r"\s*(left|right)\s*\.\s*\*\s*", re.IGNORECASE)
_ALIAS = re.compile(r"(?P<expression>.+?)\s+as\s+(?P<name>\w+|`[^`]+`)\s*", re.IGNORECASE | re.DOTALL)
_CAST = re.compile(r"\s*(?:try_)?cast\s*\(.*\bas\s+(\w+)\s*\)\s*", re.IGNORECASE | re.DOTALL)
_NAMED: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "smallint": ShortType(),
    "double": DoubleType(),
    "float": FloatType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
}


@dataclass(frozen=True)
class Selection:
    """Columns selected from one stream or table, as (name, SQL expression).

    Args:
        asset: name of the result, for messages.
        source: name of the stream or table.
        fields: its columns.
        select: the user's selection.
        key: columns that the result always has, unchanged and first.

    Raises:
        TopologyError: a column that does not exist, has no name, or is selected twice.
    """

    asset: str
    source: str
    fields: tuple[StructField, ...]
    select: tuple[str, ...] = ("*",)
    key: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        chosen = [column for item in self.select for column in self._expand(item)]
        lowered = {k.lower() for k in self.key}
        for name, expression in chosen:
            if name.lower() in lowered and expression.strip("` ").lower() != name.lower():
                raise TopologyError(
                    f"{self.asset}: {name!r} is a key column and cannot change; select {expression!r} "
                    "under another name"
                )
        keys = [(k, f"`{k}`") for k in self.key]
        chosen = keys + [c for c in chosen if c[0].lower() not in lowered]
        names = [n.lower() for n, _ in chosen]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise TopologyError(f"{self.asset}: select has {twice} more than once; rename one")
        object.__setattr__(self, "columns", tuple(chosen))

    def _expand(self, item: str) -> list[tuple[str, str]]:
        text = item.strip()
        if text == "*":
            return [(f.name, f"`{f.name}`") for f in self.fields if f.name.lower() != TIMESTAMP]
        found = self._find(text)
        if found is not None:
            return [(found.name, f"`{found.name}`")]
        if re.fullmatch(r"`[^`]+`|\w+", text):
            raise TopologyError(
                f"{self.asset}: {self.source!r} has no column {text!r}; it has "
                f"{[f.name for f in self.fields]}; an expression needs a name: 'expression as name'"
            )
        if alias := _ALIAS.fullmatch(item):
            self.check(alias.group("expression"))
            return [(alias.group("name").strip("`"), alias.group("expression"))]
        raise TopologyError(
            f"{self.asset}: {item!r} has no column name; write 'column', '*' or 'expression as name'"
        )

    def check(self, expression: str) -> None:
        """Raises TopologyError if an expression is a column's name but Spark parses it differently."""
        check_sql_name(self.asset, expression, [f.name for f in self.fields])

    def _find(self, name: str) -> StructField | None:
        plain = name.strip("` ").lower()
        return next((f for f in self.fields if f.name.lower() == plain), None)

    def type_of(self, expression: str) -> DataType:
        """Returns the type of an expression; NullType if only Spark can infer it."""
        found = self._find(expression)
        if found is not None:
            return found.dataType
        cast = _CAST.fullmatch(expression)
        return _NAMED.get(cast.group(1).lower(), NullType()) if cast else NullType()

    def fields_of_result(self) -> list[StructField]:
        """Returns the columns with their types; NullType if only Spark can infer one."""
        return [StructField(name, self.type_of(expression)) for name, expression in self.columns]

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """Returns for each column the (asset, column) pairs that it derives from."""
        return {name: self.mentioned(expression) for name, expression in self.columns}

    def mentioned(self, expression: str) -> list[tuple[str, str]]:
        """Returns the (asset, column) pairs that a SQL expression mentions."""

        def has(column: str) -> bool:
            pattern = rf"(?<![\w.]){re.escape(column)}(?!\w)"
            return re.search(pattern, expression, re.IGNORECASE) is not None

        return [(self.source, f.name) for f in self.fields if has(f.name)]


@dataclass(frozen=True)
class Side:
    """One input of a join: its asset, its columns, and its further time columns (``valid_from``...)."""

    asset: str
    fields: tuple[StructField, ...]
    times: tuple[str, ...]

    def find(self, column: str) -> StructField | None:
        """Returns a column by name, ignoring case; None if it is a time column or does not exist."""
        found = [f for f in self.fields if f.name.lower() == column.lower()]
        return found[0] if found else None


@dataclass(frozen=True)
class Projection:
    """The columns of a join's result as (name, SQL expression), key columns first if not selected.

    Args:
        asset: name of the result, for messages.
        key: the left side's key columns, which the result keeps.
        sides: ``left`` and ``right``.
        select: the user's selection.

    Raises:
        TopologyError: a column that does not exist, has no name, or is selected twice.
    """

    asset: str
    key: tuple[str, ...]
    sides: Mapping[str, Side]
    select: tuple[str, ...]
    columns: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        chosen = [column for item in self.select for column in self._expand(item)]
        for name, expression in chosen:
            self._check_key(name, expression)
        names = [n.lower() for n, _ in chosen]
        keys = [(k, f"left.`{k}`") for k in self.key if k.lower() not in names]
        chosen = keys + [c for c in chosen if not self._is_own_timestamp(*c)]
        names = [n.lower() for n, _ in chosen]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise TopologyError(
                f"{self.asset}: select has {twice} more than once; choose one side's column, or "
                f"rename it, for example "
                f"'right.{twice[0]} as {self.sides['right'].asset}_{twice[0]}'"
            )
        object.__setattr__(self, "columns", tuple(chosen))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """Returns for each column the (asset, column) pairs that it derives from."""
        return {
            name: [
                (self.sides[side.lower()].asset, column.strip("`"))
                for side, column in _REFERENCE.findall(expression)
            ]
            for name, expression in self.columns
        }

    def right_columns(self) -> set[str]:
        """Returns the right side's columns that the result uses."""
        used = {
            column.strip("`").lower()
            for _, expression in self.columns
            for side, column in _REFERENCE.findall(expression)
            if side.lower() == "right"
        }
        right = self.sides["right"]
        names = [*(f.name for f in right.fields), *right.times]
        return {n for n in names if n.lower() in used}

    def fields(self) -> list[StructField]:
        """Returns the columns with their types; NullType if only Spark can infer one."""
        return [self._field(name, expression) for name, expression in self.columns]

    def _field(self, name: str, expression: str) -> StructField:
        plain = _COLUMN.fullmatch(expression)
        if plain is None:
            cast = _CAST.fullmatch(expression)
            return StructField(
                name, _NAMED.get(cast.group(1).lower(), NullType()) if cast else NullType()
            )
        side = plain.group(1).lower()
        found = self.sides[side].find(plain.group(2).strip("`"))
        kind: DataType = found.dataType if found else TimestampType()
        return StructField(name, kind, side == "right" or found is None or found.nullable)

    def _expand(self, item: str) -> list[tuple[str, str]]:
        if odd := self._odd(item):
            return [odd]
        alias = _ALIAS.fullmatch(item)
        if alias and self._odd(alias.group("expression")):
            self._refuse_unquoted(alias.group("expression"))
        for side, column in _REFERENCE.findall(item):
            if not is_sql_name(column) and column.lower() != "null" and column[0] not in "`*":
                self._refuse_unquoted(f"{side}.{column}")
            self._check_reference(item, self.sides[side.lower()], column.strip("`"))
        if star := _STAR.fullmatch(item):
            side = star.group(1).lower()
            taken = set[str]()
            if side == "right":
                taken = {TIMESTAMP, *(f.name.lower() for f in self.sides["left"].fields)}
            fields = self.sides[side].fields
            return [(f.name, f"{side}.`{f.name}`") for f in fields if f.name.lower() not in taken]
        if plain := _COLUMN.fullmatch(item):
            return [(plain.group(2).strip("`"), item.strip())]
        if alias:
            return [(alias.group("name").strip("`"), alias.group("expression"))]
        raise TopologyError(
            f"{self.asset}: the selected column {item!r} has no name; write 'left.column', "
            "'right.column', 'left.*', 'right.*' or 'expression as name'"
        )

    def _odd(self, item: str) -> tuple[str, str] | None:
        """Returns (name, expression) if an item is just a column whose name SQL needs in backticks."""
        whole = _WHOLE.fullmatch(item)
        found = self.sides[whole[1].lower()].find(whole[2]) if whole else None
        if whole is None or found is None or is_sql_name(whole[2]):
            return None
        return found.name, f"{whole[1]}.`{found.name}`"

    def _refuse_unquoted(self, text: str) -> None:
        side, _, column = text.strip().partition(".")
        raise TopologyError(
            f"{self.asset}: select has {text.strip()!r}, which SQL does not parse as a column name; "
            f"write it in backticks, '{side.strip()}.`{column.strip()}`'"
        )

    def _check_reference(self, item: str, side: Side, column: str) -> None:
        known = [*(f.name for f in side.fields), *side.times]
        if column != "*" and column.lower() not in {k.lower() for k in known}:
            raise TopologyError(
                f"{self.asset}: select names {item!r}, but {side.asset!r} has no column {column!r}; "
                f"it has {known}"
            )

    def _check_key(self, name: str, expression: str) -> None:
        """Raises TopologyError if a key column gets another value than the stream's."""
        for k in self.key:
            if name.lower() == k.lower() and not _is(expression, k):
                raise TopologyError(
                    f"{self.asset}: {k!r} is a key column and has the stream's value; select "
                    f"{expression!r} under another name"
                )

    def _is_own_timestamp(self, name: str, expression: str) -> bool:
        """Returns whether a column is the left ``timestamp``, which the result always has; raises
        TopologyError if another expression has that name."""
        if name.lower() != TIMESTAMP:
            return False
        if not _is(expression, TIMESTAMP):
            raise TopologyError(
                f"{self.asset}: 'timestamp' is the stream record's own timestamp; select "
                f"{expression!r} under another name, for example '{expression} as seen_at'"
            )
        return True


def _is(expression: str, left_column: str) -> bool:
    plain = _COLUMN.fullmatch(expression)
    return bool(
        plain
        and plain.group(1).lower() == "left"
        and plain.group(2).strip("`").lower() == left_column.lower()
    )
