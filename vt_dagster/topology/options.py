"""The options of streams and tables: one entry each, in :data:`OPTIONS`.

The checks of a declaration, the code version, the metadata, the shape in commits, the refusals of
consumers and the reference page of options are made from these entries. The classes ``Stream``,
``Table`` and ``VersionedTable`` give an option its type, its default and its text. This module does not
import PySpark: ``lateness`` needs the refusals, and no Spark.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, wraps
from inspect import Parameter, getattr_static, signature
from numbers import Integral, Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from vt_dagster import rules
from vt_dagster.columns import BY_COLUMN, PROPAGATED_FROM, PROVIDED_COLUMNS
from vt_dagster.errors import TopologyError, VtDagsterError
from vt_dagster.topology.durations import check_duration, spoken

# Consumers


class Consumer(Enum):
    """The readers of a stream or table, in the words of messages and of the reference page."""

    STREAM_TABLE_JOIN = "a stream-table join"
    AS_KNOWN = "a join by what was known"
    CORRECTED_JOIN = "a join with corrected_for"
    TABLE_JOIN = "a table-table join"
    HISTORY_JOIN = "a table-table join with history='complete'"
    FOREIGN_KEY_JOIN = "a foreign-key join"
    GROUP_BY = "group_by"
    FILTER = "filter"
    MAP_VALUES = "map_values"
    TO_STREAM = "to_stream"
    TRAINING_SET = "a training set"
    SPINE = "the spine of a training set"
    PARTITION_SENSOR = "a partition sensor"
    LATENESS = "lateness"


class Refusal(NamedTuple):
    """Why a consumer does not read a table with an option.

    Args:
        instead: what to do instead of removing the option.
    """

    why: str
    instead: str = "use a stream-table join"


# Types


def check_types(
    declared: Any, name: str, error: type[VtDagsterError] = TopologyError, skip: Collection[str] = ()
) -> None:
    """Checks that the fields of a declaration have values of their types. Stores an equivalent value as
    one of the type, see :func:`_as_type`.

    Fixed words and durations are left to checks of their own, which name the words and an example.

    Args:
        declared: an instance of a dataclass.
        name: what is declared, for messages.
        error: the class of the error.
        skip: fields with a check of their own.

    Raises:
        VtDagsterError: a value of another type.
    """
    hints = _hints(type(declared))
    for one in fields(declared):
        given, hint = getattr(declared, one.name), hints[one.name]
        if one.name in skip or _has_own_check(hint) or _fits(given, hint):
            continue
        value = _as_type(given, hint)
        if not _fits(value, hint):
            got = repr(given) if one.repr else f"a value of type {type(given).__name__}"
            raise error(_wrong(name, one.name, hint, got))
        object.__setattr__(declared, one.name, value)


P = ParamSpec("P")
R = TypeVar("R")


def check_arguments(
    *skip: str, error: type[VtDagsterError] = TopologyError
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check the types of its arguments. Equivalent values are accepted, for example a
    path for a text, see :func:`_as_type`.

    Args:
        skip: arguments with a check of their own.
        error: the class of the error.

    Raises:
        VtDagsterError: an argument of another type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        expected = signature(function)
        kinds = {name: parameter.kind for name, parameter in expected.parameters.items()}

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            bound, hints = expected.bind(*args, **given), _hints(function)
            for name, value in [*bound.arguments.items()]:
                if name in skip or kinds[name] is Parameter.VAR_KEYWORD:
                    continue
                if isinstance(value, PurePath):
                    bound.arguments[name] = value = str(value)
                if kinds[name] is not Parameter.VAR_POSITIONAL and not _fits(value, hints[name]):
                    bound.arguments[name] = value = _as_type(value, hints[name])
                for one in value if kinds[name] is Parameter.VAR_POSITIONAL else (value,):
                    if not _fits(one, hints[name]):
                        raise error(_wrong(function.__name__, name, hints[name], repr(one)))
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def check_items(owner: str, given: Mapping[str, Any], declared: type) -> None:
    """Checks that the items of a mapping have the types that a TypedDict declares.

    Raises:
        TopologyError: an item of another type.
    """
    for name, value in given.items():
        if not _fits(value, _hints(declared)[name]):
            raise TopologyError(_wrong(owner, name, _hints(declared)[name], repr(value)))


def _wrong(owner: str, name: str, hint: Any, got: str) -> str:
    return f"{owner}: expected {name} to be {_in_words(hint)}, got {got}; correct it"


_hints = cache(get_type_hints)
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
}


def _has_own_check(hint: Any) -> bool:
    return hint is timedelta or get_origin(hint) is Literal or any(map(_has_own_check, get_args(hint)))


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has a type; a text is no list, and True no number."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is Literal:
        return value in parts
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple and ... not in parts:
        return (
            isinstance(value, tuple | list)
            and len(value) == len(parts)
            and all(map(_fits, value, parts))
        )
    if kind in (tuple, Sequence):
        # Lists are accepted for tuples: declarations convert them.
        return _holds(value, Sequence, parts[0]) and not isinstance(value, str | bytes)
    if kind is Collection:
        return _holds(value, Collection, parts[0]) and not isinstance(value, str | bytes | Mapping)
    if kind in (dict, Mapping):
        return _holds(value, Mapping, parts[0]) and all(_fits(v, parts[1]) for v in value.values())
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False):
        # getattr_static evaluates no property: that of a resource would start Spark.
        members = (member for member in vars(hint) if not member.startswith("_"))
        return all(getattr_static(value, member, None) is not None for member in members)
    return callable(value) if kind is Callable else isinstance(value, kind or hint)


def _as_type(value: Any, hint: Any) -> Any:
    """Converts a value to an expected type if that does not change its meaning: a path to a text, a
    number of NumPy or a decimal to a Python number, a dictionary's keys or values to a tuple, a number
    in a mapping of texts to a text. Returns any other value unchanged."""
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        kind, parts = get_origin(one), get_args(one)
        if one is str and isinstance(value, os.PathLike):
            return str(cast("Any", value))
        if one in (int, float) and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if one is float and isinstance(value, Real | Decimal) and not isinstance(value, bool):
            return float(value)
        if kind is Mapping and parts[1] is str and isinstance(value, Mapping):
            given = cast("Mapping[Any, Any]", value)
            return {name: _as_text_value(each) for name, each in given.items()}
        # Not a set, whose order differs between processes.
        if not isinstance(value, Iterable) or isinstance(
            value, str | bytes | Mapping | set | frozenset
        ):
            continue
        elements = cast("Iterable[Any]", value)
        if kind is Sequence or (kind is tuple and ... in parts):
            return tuple(_as_type(element, parts[0]) for element in elements)
        if kind is tuple and isinstance(value, tuple | list) and len(value) == len(parts):
            return tuple(map(_as_type, elements, parts))
    return value


def _as_text_value(value: Any) -> Any:
    """Returns a number or a path as a text; True as ``true``."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(cast("Any", value)) if isinstance(value, Real | os.PathLike) else value


def _holds(value: Any, kind: Any, element: Any) -> bool:
    return isinstance(value, kind) and all(_fits(one, element) for one in cast("Any", value))


def _in_words(hint: Any) -> str:
    """Returns a type in words, for messages."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType, Literal):
        return " or ".join(repr(part) if kind is Literal else _in_words(part) for part in parts)
    if kind in (dict, Mapping) and parts[1] is str:
        return "a mapping of texts"
    if kind in (dict, Mapping) or (parts and get_origin(parts[0]) is tuple):
        return "a mapping"  # or its pairs, which declarations make of it
    if kind is tuple and ... not in parts:
        return f"a pair of {' and '.join(map(_in_words, parts))}"
    if kind in (tuple, Sequence, Collection) and get_origin(parts[0]) is None:
        return f"a list of {_in_words(parts[0]).removeprefix('a ')}s"
    if kind in (tuple, Sequence):
        return f"a list, each element {_in_words(parts[0])}"
    if kind is Callable:
        return "a function"
    return _WORDS.get(hint) or f"a{'n' * (hint.__name__[0] in 'AEIOU')} {hint.__name__}"


# Options


class Sql(NamedTuple):
    """How the text of an option is read as a SQL expression.

    Args:
        what: the expected expression, in words.
        types: its allowed types by their names in Spark, which the first run checks over the columns of
            the source; empty: it uses the columns of the schema, and is checked when it is declared.
    """

    what: str
    types: tuple[str, ...] = ()


def as_text(value: Any) -> str:
    """Returns the value of an option as text, for metadata."""
    if isinstance(value, timedelta | Mapping):
        return spoken(cast(Any, value))
    if isinstance(value, tuple):
        return ", ".join(map(str, cast("tuple[Any, ...]", value)))
    return value.describe() if hasattr(value, "describe") else str(value)


@dataclass(frozen=True)
class Option:
    """An option of streams and tables. Its type and default are those of the field, and its text is the
    entry under ``Args`` of the class that declares it.

    Args:
        name: the field of ``Stream``, ``Table`` or ``VersionedTable``.
        check: checks a node with a value other than the default, and may store the value in another
            form.
        defines_records: whether another value gives other records, and so another code version.
        shown: whether the metadata of the asset shows it.
        text: formats the value for metadata.
        in_commit: whether commits keep it (a field of ``Shape``), for readers without definitions.
        outcomes: outcomes of records that only a table with the option has, by name; see ``rules``.
        sql: how a text is read as SQL; None: a text is not SQL.
        not_of_results: why the result of an operator cannot have it; empty: it can.
        not_of_states: why a node with a source of snapshots cannot have it; empty: it can.
        excludes: options that cannot be set beside it, each with the reason.
        refused: consumers that do not read a table with it.
        read_if: consumers that read a table with it on a condition.
        kept_if: consumers whose result keeps the option, each with the condition.
    """

    name: str
    check: Callable[[Any], None] | None = None
    defines_records: bool = False
    shown: bool = False
    text: Callable[[Any], str] = as_text
    in_commit: bool = False
    outcomes: tuple[str, ...] = ()
    sql: Sql | None = None
    not_of_results: str = ""
    not_of_states: str = ""
    excludes: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[Consumer, Refusal] = field(default_factory=dict[Consumer, Refusal])
    read_if: Mapping[Consumer, str] = field(default_factory=dict[Consumer, str])
    kept_if: Mapping[Consumer, str] = field(default_factory=dict[Consumer, str])

    def is_set(self, node: Any) -> bool:
        """Returns whether a node has another value than the default."""
        declared = type(node).__dataclass_fields__.get(self.name)
        if declared is None:
            return False
        default = declared.default
        if declared.default_factory is not MISSING:
            default = declared.default_factory()
        given = getattr(node, self.name)
        # True equals 1, the number of partitions.
        other = isinstance(given, bool) != isinstance(default, bool)
        return default is MISSING or other or bool(given != default)


def check_options(node: Any) -> None:
    """Checks the options of a stream or table, and stores some in another form.

    Raises:
        TopologyError: an invalid value, or an option that the node cannot have.
    """
    for option in OPTIONS:
        if not option.is_set(node):
            continue
        _check_place(node, option)
        if option.check is not None:
            option.check(node)
        value = getattr(node, option.name)
        if option.sql is not None and isinstance(value, str) and not value.strip():
            raise TopologyError(
                f"{node.name}: expected {option.name} to be {option.sql.what}, got {value!r}; correct "
                "it, or leave it out"
            )


def _check_place(node: Any, option: Option) -> None:
    """Raises TopologyError if a node cannot have an option, whatever its value."""
    if option.not_of_results and node.operator is not None:
        kind = "table" if node.is_table else "stream"
        raise TopologyError(
            f"{node.name}: {option.name} needs a {kind} with a source, got the result of an operator, "
            f"{option.not_of_results}: declare it on the input"
        )
    if option.not_of_states and getattr(node.source, "whole", False):
        raise TopologyError(
            f"{node.name}: {option.name} needs a table with a source of changes, got "
            f"{node.source.describe()}, {option.not_of_states}: remove {option.name}"
        )
    for other, why in option.excludes.items():
        if _BY_NAME[other].is_set(node):
            raise TopologyError(
                f"{node.name}: {option.name} does not allow {other}, got {getattr(node, other)!r}: "
                f"{why}; remove one of the two"
            )


def set_options(node: Any) -> list[Option]:
    """Returns the options of a node that have another value than the default."""
    return [option for option in OPTIONS if option.is_set(node)]


def definition_of(node: Any) -> dict[str, str]:
    """Returns the values of the options that define a node's records, for its code version."""
    found = {o.name: getattr(node, o.name) for o in set_options(node) if o.defines_records}
    made = {n: v.describe() if hasattr(v, "describe") else v for n, v in found.items()}
    return {n: v if isinstance(v, str) else repr(v) for n, v in made.items()}


def shown_options(node: Any) -> dict[str, str]:
    """Returns the options that a node's metadata shows, as text."""
    return {o.name: o.text(getattr(node, o.name)) for o in set_options(node) if o.shown}


def options_in_commit(owner: Any) -> dict[str, Any]:
    """Returns the options that commits keep.

    Args:
        owner: a stream or table, or its ``Shape`` in a commit.
    """
    return {option.name: getattr(owner, option.name, None) for option in OPTIONS if option.in_commit}


class Refused(NamedTuple):
    """An option that a consumer refuses, with its value."""

    option: str
    value: Any
    refusal: Refusal


def refused_option(consumer: Consumer, owner: Any) -> Refused | None:
    """Returns the first option that a consumer refuses; None = it reads the table.

    Args:
        owner: a stream or table, or its ``Shape`` in a commit.
    """
    for option in OPTIONS:
        value = getattr(owner, option.name, None)
        if consumer in option.refused and value is not None:
            return Refused(option.name, value, option.refused[consumer])
    return None


def require_readable(name: str, consumer: Consumer, node: Any) -> None:
    """Raises TopologyError if a consumer refuses an option of a stream or table.

    Args:
        name: the asset of the consumer, for the message.
    """
    found = refused_option(consumer, node)
    if found is not None:
        option, value, (why, instead) = found
        shown = list(value) if isinstance(value, tuple) else value
        raise TopologyError(
            f"{name}: {consumer.value} needs an input without {option}, got {node.name!r} with "
            f"{option}={shown!r}: {why}; {instead}, or remove {option}"
        )


# Checks


def _check_partitions(node: Any) -> None:
    given = node.partitions
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
        raise TopologyError(f"{node.name}: partitions must be 1 or more, got {node.partitions!r}")
    object.__setattr__(node, "partitions", int(node.partitions))


def _check_null_key(node: Any) -> None:
    if node.null_key not in ("quarantine", "keep"):
        raise TopologyError(
            f"{node.name}: null_key must be 'quarantine' or 'keep', got {node.null_key!r}"
        )
    if node.is_table:
        raise TopologyError(
            f"{node.name}: a table cannot keep records without a key; leave null_key out"
        )


def _check_on_contract_break(node: Any) -> None:
    if node.on_contract_break not in ("fail", "quarantine"):
        raise TopologyError(
            f"{node.name}: on_contract_break must be 'fail' or 'quarantine', got "
            f"{node.on_contract_break!r}"
        )
    if pandera_schema(node.contract) is None:
        raise TopologyError(
            f"{node.name}: on_contract_break needs a pandera model with checks as the schema, got a "
            "StructType; pass a pandera model, or remove on_contract_break"
        )


def _check_freshness(node: Any) -> None:
    wanted = node.freshness
    length = isinstance(wanted, timedelta) and wanted >= timedelta(0)
    if not (wanted in ("every_run", "on_growth") or length):
        raise TopologyError(
            f"{node.name}: freshness must be 'on_growth', 'every_run' or a timedelta of 0 or more, "
            f"got {wanted!r}"
        )
    if not node.is_table:
        raise TopologyError(
            f"{node.name}: freshness applies to a table's view, but a stream only has a log, "
            "which each run appends to: remove freshness"
        )


def _check_length(option: str) -> Callable[[Any], None]:
    return lambda node: check_duration(node.name, option, getattr(node, option))


def _check_unique_by(node: Any) -> None:
    """Checks ``unique_by``, and stores it as a tuple."""
    _refuse_on_table(node, "unique_by")
    if node.within is None:
        raise TopologyError(
            f"{node.name}: unique_by needs within, the stream time for which a value is remembered, "
            "got none; set for example within=timedelta(days=7)"
        )
    named = (node.unique_by,) if isinstance(node.unique_by, str) else node.unique_by
    columns = _distinct(node, "unique_by", named, node.schema.fields, "no record is a duplicate", "")
    _refuse_maps(node, "unique_by", columns)
    object.__setattr__(node, "unique_by", columns)


def _check_within(node: Any) -> None:
    _refuse_on_table(node, "within")
    if node.unique_by is None:
        raise TopologyError(
            f"{node.name}: within needs unique_by, the columns that identify a record, got none; set "
            "unique_by, or remove within"
        )
    check_duration(node.name, "within", node.within)
    if not isinstance(node.within, timedelta) or not node.within:
        raise TopologyError(
            f"{node.name}: within must be one duration longer than 0, got {node.within!r}; set for "
            "example within=timedelta(days=7)"
        )


def _refuse_maps(node: Any, setting: str, columns: Sequence[str]) -> None:
    kinds = {c: node.schema[c].dataType for c in columns}
    maps = [f"{c} {kind.simpleString()}" for c, kind in kinds.items() if holds_map(kind)]
    if maps:
        raise TopologyError(
            f"{node.name}: expected {setting} to name columns whose values can be compared, got "
            f"{maps}; name other columns, for example a string made from the map"
        )


def _refuse_on_table(node: Any, setting: str) -> None:
    if node.is_table:
        raise TopologyError(
            f"{node.name}: {setting} is for streams, got a {type(node).__name__}, in which a repeated "
            "record replaces its row by an equal one; remove it, or declare a Stream and use its "
            "to_table()"
        )


def _check_broadcast(node: Any) -> None:
    if node.broadcast is not True:
        raise TopologyError(
            f"{node.name}: broadcast must be True or False, got {node.broadcast!r}; correct it"
        )
    if node.versioned:
        raise TopologyError(
            f"{node.name}: a versioned table cannot be broadcast, since its history need not fit "
            "into an executor's memory; leave broadcast out, or declare it as a plain Table"
        )


def _check_deleted_when(node: Any) -> None:
    """Checks ``deleted_when``, and stores it as ``tombstone``."""
    condition = node.deleted_when
    if not isinstance(condition, str) or not condition.strip():
        raise TopologyError(
            f"{node.name}: expected deleted_when to be a SQL condition over the columns of the source, "
            f"like \"op = 'D'\", got {condition!r}; correct it, or leave it out"
        )
    if node.tombstone is not None:
        raise TopologyError(
            f"{node.name}: expected only one of deleted_when and its alias tombstone, got "
            f"{condition!r} and {node.tombstone!r}; remove one, or combine both conditions with OR"
        )
    object.__setattr__(node, "tombstone", condition)
    object.__setattr__(node, "deleted_when", None)


def _check_deleted_at(node: Any) -> None:
    if not isinstance(node.deleted_at, str) or not node.deleted_at.strip():
        raise TopologyError(
            f"{node.name}: expected deleted_at to be a SQL expression of type timestamp over the "
            f'columns of the source, like "removed_on" or "record_time", got {node.deleted_at!r}; '
            "correct it, or leave it out"
        )


def _check_segment_interval(node: Any) -> None:
    check_duration(node.name, "segment_interval", node.segment_interval)
    if node.segment_interval <= timedelta(0):
        raise TopologyError(
            f"{node.name}: segment_interval must be longer than 0, got {node.segment_interval}; "
            "leave it out for the default"
        )


def _check_ready(node: Any) -> None:
    ready = node.ready
    timed = isinstance(ready, datetime) and ready.tzinfo is not None
    if ready != "initial_load" and not timed:
        raise TopologyError(
            f"{node.name}: ready must be 'initial_load', a datetime with a time zone or None, got "
            f"{ready!r}"
        )


def _check_start(node: Any) -> None:
    name, start, source = node.name, node.start, node.source
    if not getattr(start, "whole", False):
        raise TopologyError(
            f"{name}: expected start to be a source of snapshots, SnapshotSource(...) or "
            f"DeltaSource(..., mode='snapshots'), got {start!r}; pass one, or remove start"
        )
    if not hasattr(source, "news") or getattr(source, "whole", False):
        raise TopologyError(
            f"{name}: start needs a source of changes (files, topics or a Delta table), got "
            f"{source!r}; set such a source, or remove start"
        )
    start.check(name, node.key, node.schema)


def _check_tie_break(node: Any) -> None:
    values = _values(node)
    found = next((f for f in values if f.name == node.tie_break), None)
    if found is None:
        raise TopologyError(
            f"{node.name}: expected tie_break to be a value column, one of {[f.name for f in values]}, "
            f"got {node.tie_break!r}; correct it, or remove tie_break"
        )
    if holds_map(found.dataType):
        raise TopologyError(
            f"{node.name}: expected tie_break to be a column whose values have an order, got "
            f"{node.tie_break!r} of type {found.dataType.simpleString()}; name another column, for "
            "example a number"
        )


def _check_valid_until(node: Any) -> None:
    values = _values(node)
    found = next((f for f in values if f.name == node.valid_until), None)
    if found is None or found.dataType.typeName() != "timestamp":
        kinds = [f"{f.name} {f.dataType.simpleString()}" for f in values]
        raise TopologyError(
            f"{node.name}: expected valid_until to be a value column of type timestamp, got "
            f"{node.valid_until!r} among {kinds}; correct it, or remove valid_until"
        )


def _check_new_version_on(node: Any) -> None:
    """Checks ``new_version_on``, and stores it as a tuple."""
    values, otherwise = _values(node), "every record makes a version"
    columns = _distinct(node, "new_version_on", node.new_version_on, values, otherwise)
    _refuse_maps(node, "new_version_on", columns)
    if node.valid_until is not None and node.valid_until not in columns:
        raise TopologyError(
            f"{node.name}: expected new_version_on to include valid_until, {node.valid_until!r}, got "
            f"{list(columns)}: a record that only changes the end would make no version, and its end "
            "would be lost; add the column, or remove one of the two settings"
        )
    object.__setattr__(node, "new_version_on", columns)


def _check_only_columns(node: Any) -> None:
    """Checks ``only_columns``, and stores a list as a tuple."""
    only = node.only_columns
    _check_added_columns(node, "only_columns")
    if isinstance(only, str) and only.strip():
        return
    if isinstance(only, str):
        raise TopologyError(
            f"{node.name}: expected only_columns to be a list of value columns or a SQL expression "
            f"that returns their names, got {only!r}; correct it, or remove only_columns"
        )
    otherwise = "every record provides its whole row"
    columns = _distinct(node, "only_columns", only, _provided(node), otherwise)
    object.__setattr__(node, "only_columns", columns)


def _check_ignore_null_updates(node: Any) -> None:
    """Checks ``ignore_null_updates``, and stores a list as a tuple."""
    _check_added_columns(node, "ignore_null_updates")
    nulls = node.ignore_null_updates
    if isinstance(nulls, bool):
        return
    otherwise = "a null sets a column to null"
    may = [f for f in _provided(node) if f.name != node.tie_break]
    columns = _distinct(node, "ignore_null_updates", nulls, may, otherwise)
    object.__setattr__(node, "ignore_null_updates", columns)


def _check_added_columns(node: Any, setting: str) -> None:
    added = {PROVIDED_COLUMNS, PROPAGATED_FROM}
    added |= set() if node.tie_break is None else {f"{node.tie_break}{BY_COLUMN}".lower()}
    taken = added & {name.lower() for name in node.schema.names}
    if taken:
        raise TopologyError(
            f"{node.name}: expected no columns named {sorted(taken)}, which vt_dagster adds to a table "
            f"with {setting}: rename them"
        )


def holds_map(kind: Any) -> bool:
    """Returns whether a type contains a map, which Spark can neither group nor sort by."""
    return '"type":"map"' in kind.json()


def pandera_schema(declared: Any) -> Any:
    """Returns the pandera schema of a declared schema, which may be a model or a ``DataFrameSchema``;
    None = it has none."""
    if hasattr(declared, "to_schema"):
        return declared.to_schema()
    return declared if hasattr(declared, "checks") else None


def _values(node: Any) -> list[Any]:
    return [node.schema[c] for c in node.value_columns]


def _provided(node: Any) -> list[Any]:
    """Returns the columns that a partial update may omit."""
    return [f for f in _values(node) if f.name not in (node.timestamp, node.valid_until)]


def _distinct(
    node: Any,
    setting: str,
    columns: object,
    values: Sequence[Any],
    otherwise: str,
    kind: str = "value ",
) -> tuple[str, ...]:
    """Returns a list of distinct columns as a tuple.

    Args:
        values: the columns that it may name.
        otherwise: the behaviour without the setting, for messages.
        kind: which columns these are, for messages.
    """
    listed = isinstance(columns, list | tuple) and all(isinstance(c, str) for c in columns)
    found = tuple(cast("Sequence[str]", columns)) if listed else ()
    if not found or len({*found}) < len(found):
        raise TopologyError(
            f"{node.name}: expected {setting} to be a list of {kind}columns, each once, some of "
            f"{[f.name for f in values]}, got {columns!r}; correct it, or remove {setting}: then "
            f"{otherwise}"
        )
    unknown = [c for c in found if c not in {f.name for f in values}]
    if unknown:
        raise TopologyError(
            f"{node.name}: expected {setting} to name {kind}columns, some of "
            f"{[f.name for f in values]}, got {unknown}, which are "
            f"{'key columns or ' if kind else ''}not in the schema; correct it"
        )
    return found


# Entries

_FOLLOW_RECORDS = (
    Consumer.HISTORY_JOIN,
    Consumer.FOREIGN_KEY_JOIN,
    Consumer.CORRECTED_JOIN,
    Consumer.AS_KNOWN,
)
"""Consumers that read the log of a table and treat each record as a change of a row."""
_NO_RECORD = Refusal("it follows records, and a version that ends by itself has no record of its end")
_NO_VERSION = Refusal("it follows records, and some records make no version")
_WHOLE_LOG = Refusal(
    "it reads versions as of earlier system times, which needs the whole log",
    "join with as_known='now'",
)
_WHOLE_ROWS = "which provides whole rows"
_PARTIAL_ROWS = "a partial update is checked with the values that it does not provide, after the merge"
_UNCHANGED = "the result has a history retention, and selects"
_SENT_ONCE = "which no producer sends twice"

OPTIONS: tuple[Option, ...] = (
    Option("key", defines_records=True, shown=True),
    Option("schema", defines_records=True),
    Option("timestamp", defines_records=True, sql=Sql("a SQL expression of type timestamp")),
    Option("tombstone", defines_records=True, sql=Sql("a SQL condition", ("boolean", "void"))),
    Option("partitions", _check_partitions),
    Option("partition_by", sql=Sql("a SQL expression over the key columns")),
    Option("source", shown=True),
    Option("null_key", _check_null_key, defines_records=True),
    Option("description"),
    Option("group"),
    Option("owners"),
    Option("key_prefix"),
    Option("freshness", _check_freshness),
    Option("renamed"),
    Option(
        "log_retention",
        _check_length("log_retention"),
        shown=True,
        refused={
            Consumer.AS_KNOWN: _WHOLE_LOG,
            Consumer.SPINE: Refusal("each run reads the whole log", "use another stream"),
        },
    ),
    Option(
        "unique_by",
        _check_unique_by,
        defines_records=True,
        shown=True,
        in_commit=True,
        outcomes=(rules.DUPLICATE.name,),
        not_of_results=_SENT_ONCE,
    ),
    Option(
        "within",
        _check_within,
        defines_records=True,
        shown=True,
        in_commit=True,
        not_of_results=_SENT_ONCE,
    ),
    Option(
        "on_contract_break",
        _check_on_contract_break,
        shown=True,
        not_of_results="which must not lack rows that follow from its inputs",
        not_of_states="of which only the changed rows are checked, so that the share of broken rows "
        "that max_bad_share limits is not known",
        excludes=dict.fromkeys(("only_columns", "ignore_null_updates"), _PARTIAL_ROWS),
    ),
    Option("broadcast", _check_broadcast),
    Option("deleted_when", _check_deleted_when),
    Option(
        "deleted_at",
        _check_deleted_at,
        defines_records=True,
        shown=True,
        sql=Sql("a SQL expression of type timestamp", ("timestamp", "void")),
        not_of_results="whose deletions have the times of its inputs",
    ),
    Option("history_retention", _check_length("history_retention"), defines_records=True, shown=True),
    Option("segment_interval", _check_segment_interval),
    Option("ready", _check_ready, shown=True, not_of_results="which is ready when its inputs are"),
    Option(
        "tie_break",
        _check_tie_break,
        defines_records=True,
        shown=True,
        outcomes=(rules.LOST_TIE.name,),
        not_of_results="whose inputs decide which of several records counts",
    ),
    Option(
        "valid_until",
        _check_valid_until,
        defines_records=True,
        shown=True,
        in_commit=True,
        refused=dict.fromkeys((*_FOLLOW_RECORDS, Consumer.TABLE_JOIN, Consumer.GROUP_BY), _NO_RECORD),
        kept_if={
            Consumer.FILTER: "the result has a history retention",
            Consumer.MAP_VALUES: f"{_UNCHANGED} the column unchanged",
        },
    ),
    Option(
        "start",
        _check_start,
        defines_records=True,
        shown=True,
        outcomes=(rules.COVERED.name,),
        not_of_results="which starts with the rows of its inputs",
    ),
    Option(
        "new_version_on",
        _check_new_version_on,
        defines_records=True,
        shown=True,
        in_commit=True,
        refused={
            **dict.fromkeys(_FOLLOW_RECORDS, _NO_VERSION),
            Consumer.TO_STREAM: _NO_VERSION,
            Consumer.PARTITION_SENSOR: Refusal(
                "a late record may change versions after the next record too, which the timestamps do "
                "not show",
                "request partitions with a schedule",
            ),
            Consumer.LATENESS: Refusal(
                "the cost of another grace period cannot be computed",
                "run vt-dagster explain for a single row",
            ),
        },
        read_if=dict.fromkeys(
            (Consumer.TABLE_JOIN, Consumer.GROUP_BY), "it uses only the key and these columns"
        ),
        kept_if={
            Consumer.FILTER: "the result has a history retention, and the condition is over the key "
            "and these columns",
            Consumer.MAP_VALUES: f"{_UNCHANGED} these columns unchanged",
        },
    ),
    Option(
        "only_columns",
        _check_only_columns,
        defines_records=True,
        shown=True,
        sql=Sql("a SQL expression that gives an array of names or a text", ("array<string>", "string")),
        not_of_results=_WHOLE_ROWS,
        not_of_states=_WHOLE_ROWS,
    ),
    Option(
        "ignore_null_updates",
        _check_ignore_null_updates,
        defines_records=True,
        shown=True,
        text=lambda value: "all" if value is True else as_text(value),
        not_of_results=_WHOLE_ROWS,
        not_of_states=_WHOLE_ROWS,
    ),
)
"""The options of ``Stream``, ``Table`` and ``VersionedTable``, in the order of their checks."""

_BY_NAME = {option.name: option for option in OPTIONS}
