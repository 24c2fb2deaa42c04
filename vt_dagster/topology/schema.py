"""The schema of a stream or table: checks, comparison of types, renamed columns.

**Renamed columns.** Files identify a column by name, so old rows have it under an earlier name. The
metadata of a field, in a table's schema and in a declared one, lists its earlier names; readers return
the value under the current name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any, TypeVar, cast

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CharType,
    DataType,
    DateType,
    IntegralType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from vt_dagster.columns import OLD, RESERVED, TIMESTAMP, WAS
from vt_dagster.errors import TopologyError
from vt_dagster.topology.options import holds_map, pandera_schema
from vt_dagster.topology.specification import Names

# Column renames


def was(field: StructField) -> tuple[str, ...]:
    """Returns the earlier names of a field, the newest first."""
    return tuple((field.metadata or {}).get(WAS, ()))


def named(name: str, kind: DataType, before: Sequence[str]) -> StructField:
    """Returns a field that has its column's earlier names in its metadata.

    Args:
        before: the earlier names, newest first.
    """
    return StructField(name, kind, metadata={WAS: list(before)} if before else None)


def earlier_names(columns: StructType) -> set[str]:
    """Returns all earlier names of columns."""
    return {name for field in columns.fields for name in was(field)}


def noted(columns: StructType, like: StructType) -> StructType:
    """Returns columns with the earlier names that the columns of ``like`` have, also inside ``old``."""
    known = {f.name: f for f in like.fields}

    def one(field: StructField) -> StructField:
        other, kind = known.get(field.name), field.dataType
        if field.name == OLD and isinstance(kind, StructType):
            inner = other.dataType if other is not None else None
            kind = noted(kind, inner) if isinstance(inner, StructType) else kind
        return named(field.name, kind, () if other is None else was(other))

    return StructType([one(f) for f in columns.fields])


def with_all_names(columns: StructType, stored: StructType) -> StructType:
    """Returns columns with their own earlier names and those stored in a table's schema."""
    groups = [{f.name, *was(f)} for f in stored.fields if was(f)]

    def one(field: StructField) -> StructField:
        kind, names = field.dataType, dict.fromkeys((field.name, *was(field)))
        for group in groups:
            if group & names.keys():
                names |= dict.fromkeys(sorted(group))
        inner = next((f.dataType for f in stored.fields if f.name == OLD), None)
        if field.name == OLD and isinstance(kind, StructType) and isinstance(inner, StructType):
            kind = with_all_names(kind, inner)
        return named(field.name, kind, [n for n in names if n != field.name])

    return StructType([one(f) for f in columns.fields])


def names_before(asset: str, renamed: Mapping[str, str], schema: StructType) -> Names:
    """Returns the earlier names by column, from a declared ``{old: new}`` with an entry per old name.

    Raises:
        TopologyError: ``renamed`` is no mapping of names, a new name is not a column, or an old name is
            one.
    """
    pairs = renamed.items() if isinstance(renamed, Mapping) else [(None, None)]
    if not all(isinstance(one, str) for pair in pairs for one in pair):
        raise TopologyError(
            f"{asset}: expected renamed to map earlier column names to current ones, as "
            f"{{'before': 'now'}}, got {renamed!r}; correct or remove it"
        )
    found: dict[str, tuple[str, ...]] = {}
    columns = {name.lower() for name in schema.names}
    for old in renamed:
        new, seen = renamed[old], {old}
        while new in renamed and new not in seen:
            seen.add(new)
            new = renamed[new]
        odd = {old.lower(), new.lower()} & {TIMESTAMP, *RESERVED}
        if old.lower() in columns or new not in schema.names or odd:
            raise TopologyError(
                f"{asset}: expected renamed to map earlier column names to current ones, as "
                f"{{'before': 'now'}}, where only the current name is a column, got {old!r}: {new!r} "
                f"with the columns {schema.names}; correct or remove the entry"
            )
        found[new] = (old, *found.get(new, ()))
    return found


# Schema


_ODD_CHARACTERS = re.compile(r"[ .,;{}()=`]")
_SQL_NAME = re.compile(
    r"(?!(?:null|true|false|\d+(?:e\d+)?(?:[lsyfd]|bd)?)$)[a-z0-9_]+", re.ASCII | re.IGNORECASE
)
"""A name that SQL accepts without backticks: letters, digits and underscores, and no literal."""


def is_sql_name(name: str) -> bool:
    """Returns whether SQL accepts a column name without backticks."""
    return _SQL_NAME.fullmatch(name) is not None


def check_sql_name(name: str, text: str, columns: Sequence[str]) -> None:
    """Raises TopologyError if SQL text equals a column's name but Spark parses it differently."""
    plain = text.strip()
    if plain.lower() in {c.lower() for c in columns} and not is_sql_name(plain):
        raise TopologyError(
            f"{name}: {plain!r} is the name of a column, but SQL does not parse it as one; write it in "
            f"backticks, '`{plain}`', or, if it is an expression, in parentheses, '({plain})'"
        )


def as_struct(schema: Any, name: str) -> StructType:
    """Returns a StructType, or that of a pandera model (``to_structtype``), with STRING for CHAR and
    VARCHAR."""
    if isinstance(schema, StructType):
        return _plain(schema)
    convert = getattr(schema, "to_structtype", None)
    if convert is None:
        raise TopologyError(
            f"{name}: schema must be a pandera.pyspark DataFrameModel or a StructType, got {schema!r}; "
            "write for example StructType().add('product', 'string').add('at', 'timestamp'), which, "
            "unlike the text of columns in StructType.fromDDL, needs no Spark session"
        )
    unique = getattr(pandera_schema(schema), "unique", None)
    if unique:
        raise TopologyError(
            f"{name}: expected a pandera model without unique in its Config, got {unique}: a run sees "
            "its new records alone, of which several may have one key; remove it: a table has one row "
            "for each key, and unique_by of a stream leaves repeated records out"
        )
    found = _plain(cast(StructType, convert()))
    for column, declared in getattr(pandera_schema(schema), "columns", {}).items():
        if column in found.names and isinstance(found[column].dataType, NumericType):
            _require_numbers(name, column, declared.checks)
    return found


_COMPARISONS = {
    "equal_to": "eq",
    "not_equal_to": "ne",
    "greater_than": "gt",
    "greater_than_or_equal_to": "ge",
    "less_than": "lt",
    "less_than_or_equal_to": "le",
    "in_range": "in_range",
    "isin": "isin",
    "notin": "notin",
}
"""The parameters of ``pandera.pyspark.Field``, by the names of pandera's checks."""


def _require_numbers(name: str, column: str, checks: Sequence[Any]) -> None:
    """Raises TopologyError for a check that compares a column of numbers with something else."""
    for check in (one for one in checks if one.name in _COMPARISONS):
        for setting, value in (check.statistics or {}).items():
            if setting.startswith("include"):  # whether the end of a range belongs to it
                continue
            several = check.name in ("isin", "notin") and not isinstance(value, str)
            odd = [one for one in (value if several else (value,)) if not _is_number(one)]
            if odd:
                raise TopologyError(
                    f"{name}: expected {_COMPARISONS[check.name]} of the column {column!r} to compare "
                    f"with numbers, got {odd[0]!r}; correct it"
                )


def _is_number(value: Any) -> bool:
    """Returns whether a value compares with a number, perhaps as a text of it."""
    if not isinstance(value, str):
        return isinstance(value, Number) and not isinstance(value, bool)
    try:
        Decimal(value)
    except InvalidOperation:
        return False
    return True


_T = TypeVar("_T", bound=DataType)


def _plain(kind: _T) -> _T:
    """Returns a type with STRING for CHAR and VARCHAR, as Spark reads them, at any depth."""
    found: DataType = kind
    if isinstance(kind, StructType):
        fields = [StructField(f.name, _plain(f.dataType), f.nullable, f.metadata) for f in kind.fields]
        found = StructType(fields)
    elif isinstance(kind, ArrayType):
        found = ArrayType(_plain(kind.elementType), kind.containsNull)
    elif isinstance(kind, MapType):
        found = MapType(_plain(kind.keyType), _plain(kind.valueType), kind.valueContainsNull)
    elif isinstance(kind, CharType | VarcharType):
        found = StringType()
    return cast(_T, found)


def types_in(kind: DataType) -> Iterator[DataType]:
    """Yields a type and all types in it, at any depth."""
    yield kind
    inner = list[DataType]()
    if isinstance(kind, StructType):
        inner = [f.dataType for f in kind.fields]
    elif isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    for one in inner:
        yield from types_in(one)


_STORED = (NumericType, BooleanType, BinaryType, DateType, TimestampType, TimestampNTZType)
_STORED_PARTS = (ArrayType, MapType, StructType)
_INSTEAD = (
    "a variant as STRING with its JSON, a text with a collation as STRING (expressions may use "
    "COLLATE), an interval as BIGINT of its smallest unit, a time of day as STRING, a null as "
    "CAST(NULL AS STRING), a struct with a field"
)


def refuse_types(columns: StructType, where: str) -> None:
    """Raises TopologyError for columns of types that the Delta protocol does not have, at any depth.

    Args:
        where: the asset, for the message.
    """

    def stored(kind: DataType) -> bool:
        if isinstance(kind, StructType):
            return bool(kind.fields)
        if isinstance(kind, StringType):
            return "collate" not in kind.simpleString()
        return isinstance(kind, (*_STORED, *_STORED_PARTS))

    odd = [
        f"{f.name} {f.dataType.simpleString()}"
        for f in columns.fields
        if f.name != OLD and not all(stored(kind) for kind in types_in(f.dataType))
    ]
    if odd:
        raise TopologyError(
            f"{where}: expected types that every reader of its Delta tables knows, got {odd}; use "
            f"instead {_INSTEAD}"
        )


def check_columns(
    name: str, kind: str, key: Sequence[str], schema: StructType, timestamp: str, inferred: bool
) -> None:
    """Raises TopologyError for column names and types that tables cannot have, and for invalid keys.

    Args:
        name, kind: of the stream or table, for messages.
        timestamp: column or SQL expression of the record's timestamp.
        inferred: whether NullType stands for a type that only Spark can infer: an operator's result.
    """
    names = [f.name for f in schema.fields]
    lowered = [n.lower() for n in names]
    twice = sorted({n for n in lowered if lowered.count(n) > 1})
    if twice:
        raise TopologyError(
            f"{name}: columns {twice} occur more than once in the schema (Spark ignores case); "
            "rename one"
        )
    taken = [n for n in names if n.lower() in RESERVED or n.startswith("_")]
    if taken:
        raise TopologyError(
            f"{name}: columns {taken} have names that vt_dagster reserves "
            f"({', '.join(sorted(RESERVED))}, and names that begin with an underscore); "
            "rename them in the schema"
        )
    _check_characters(name, schema)
    known = [f for f in schema.fields if not inferred or not isinstance(f.dataType, NullType)]
    refuse_types(StructType(known), name)
    if TIMESTAMP in lowered and timestamp != TIMESTAMP:
        raise TopologyError(
            f"{name}: the schema has a column 'timestamp', but the record's timestamp is "
            f"declared as {timestamp!r}; the log can hold only one 'timestamp': rename the "
            "column or declare timestamp='timestamp'"
        )
    if not key:
        raise TopologyError(f"{name}: a {kind} needs at least one key column, got none; name one")
    if len({*key}) < len(key):
        raise TopologyError(f"{name}: expected each key column once, got {list(key)}; remove the rest")
    missing = [k for k in key if k not in names]
    if missing:
        raise TopologyError(
            f"{name}: key columns {missing} are not in the schema, which has {names}; correct the key, "
            "or add them to the schema"
        )
    timed = [k for k in key if k.lower() == TIMESTAMP]
    if timed:
        raise TopologyError(
            f"{name}: expected a key without 'timestamp', which differs between records of one key; "
            "copy it to a column with another name to use it as key"
        )
    for k in key:
        if holds_map(schema[k].dataType):
            raise TopologyError(
                f"{name}: key column {k!r} is {schema[k].dataType.simpleString()}; "
                "Spark can neither group nor join by a map: use its entries or a string"
            )


def check_timestamp(name: str, schema: StructType, timestamp: str) -> None:
    """Raises TopologyError if the timestamp column is missing or no TIMESTAMP; Spark checks
    expressions."""
    if timestamp in schema.names:
        if not isinstance(schema[timestamp].dataType, TimestampType):
            got = schema[timestamp].dataType
            written = timestamp if is_sql_name(timestamp) else f"`{timestamp}`"
            example = f"cast({written} as timestamp)"
            if isinstance(got, NumericType):
                whole = isinstance(got, IntegralType)
                example = f"timestamp_{'millis' if whole else 'seconds'}({written})"
            raise TopologyError(
                f"{name}: timestamp column {timestamp!r} is {got.simpleString()}, expected timestamp; "
                f"convert it in an expression, for example timestamp='{example}'"
            )
    elif timestamp.isidentifier() or not timestamp.strip():
        raise TopologyError(
            f"{name}: timestamp column {timestamp!r} is not in the schema, which has "
            f"{schema.names}; name one of them, or an expression over them"
        )


def same_types(ones: Sequence[DataType], others: Sequence[DataType]) -> bool:
    """Returns whether keys can be compared; NullType (only Spark can infer the type) fits any type."""
    if len(ones) != len(others):
        return False
    unknown = NullType()
    return all(unknown in (a, b) or same(a, b) for a, b in zip(ones, others, strict=True))


def same(one: DataType, other: DataType) -> bool:
    """Returns whether two types are equal except for nullability."""
    return nullable(one.jsonValue()) == nullable(other.jsonValue())


def nullable(kind: Any) -> Any:
    """Returns a Spark type's JSON with all fields nullable and without metadata, as in Delta tables."""
    if isinstance(kind, dict):
        named = {k: nullable(v) for k, v in kind.items()}
        flags = {"nullable", "containsNull", "valueContainsNull"}
        named.update({flag: True for flag in flags if flag in kind})
        return {**named, "metadata": {}} if "metadata" in kind else named
    return [nullable(one) for one in kind] if isinstance(kind, list) else kind


Fits = Callable[[DataType, DataType], bool]


def differences(
    got: DataType, wanted: DataType, path: str, fits: Fits = lambda got, wanted: False
) -> list[str]:
    """Returns the parts in which values of type ``got`` cannot be read as ``wanted``, with both types.

    Fields match by name at any depth: order, nullability and fields only in ``got`` are ignored. A
    field only in ``wanted`` is read as null; but a struct needs at least one of its fields, or all of
    it would be null, and no name that differs only in case.

    Args:
        path: path of the value, for messages.
        fits: whether an atomic type is readable as another, different one.
    """
    if isinstance(got, ArrayType) and isinstance(wanted, ArrayType):
        return differences(got.elementType, wanted.elementType, f"{path}[]", fits)
    if isinstance(got, MapType) and isinstance(wanted, MapType):
        keys = differences(got.keyType, wanted.keyType, f"{path}.key", fits)
        return keys + differences(got.valueType, wanted.valueType, f"{path}.value", fits)
    if isinstance(got, StructType) and isinstance(wanted, StructType):
        there = {f.name: f.dataType for f in got.fields}
        both = [f for f in wanted.fields if f.name in there]
        if not both:
            return [f"{path} has the fields {got.names}, expected some of {wanted.names}"]
        others = {name.lower(): name for name in got.names if name not in wanted.names}
        named = [
            f"{path}.{f.name} is named {others[f.name.lower()]!r}, expected the same case"
            for f in wanted.fields
            if f.name not in there and f.name.lower() in others
        ]
        return named + [
            difference
            for f in both
            for difference in differences(there[f.name], f.dataType, f"{path}.{f.name}", fits)
        ]
    if same(_plain(got), _plain(wanted)) or fits(got, wanted):
        return []
    return [f"{path} is {got.simpleString()}, expected {wanted.simpleString()}"]


def _check_characters(name: str, schema: StructType) -> None:
    """Raises TopologyError for columns or nested fields with names that Delta or Spark SQL refuses."""
    paths = list(_paths(schema, ()))
    odd = [
        "/".join(path)
        for path in paths
        if not path[-1].isprintable() or path[-1] in ("", "*") or _ODD_CHARACTERS.search(path[-1])
    ]
    if odd:
        raise TopologyError(
            f"{name}: columns or fields {odd} have names that Delta Lake or Spark SQL does not accept "
            "(empty, *, or with a space . , ; { } ( ) = ` or a non-printable character); rename them "
            "in the schema"
        )
    lowered = ["/".join(path).lower() for path in paths]
    twice = sorted({path for path in lowered if lowered.count(path) > 1})
    if twice:
        raise TopologyError(
            f"{name}: fields {twice} occur more than once in their struct (Spark ignores case); rename "
            "one"
        )


def _paths(kind: DataType, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the path of each column and nested field, as a tuple of names."""
    if isinstance(kind, StructType):
        for f in kind.fields:
            yield (*above, f.name)
            yield from _paths(f.dataType, (*above, f.name))
    elif isinstance(kind, ArrayType):
        yield from _paths(kind.elementType, above)
    elif isinstance(kind, MapType):
        yield from _paths(kind.keyType, (*above, "key"))
        yield from _paths(kind.valueType, (*above, "value"))
