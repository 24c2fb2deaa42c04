"""How the columns of a live table may change in place: what is followed, and what is refused. No Spark.

A plain Delta table has one schema, and data files keep the columns that they were written with. So what
is followed is what every reader makes the same of: a file without a column gives nulls, and a file with
a shorter number gives that number. Tried with Spark, Arrow, ``deltalake``, Polars and DuckDB:

- whole numbers of more bytes, float to double, a decimal with more digits before the point: all read
  them. More digits *behind* the point Polars refuses to read, so that is refused here.
- A name is all that a file knows a column by, and column mapping few engines read. So a column that is
  renamed is another one to the table, of which the new field notes the old names; readers of this
  library give the value of whichever a row has, by the new name. A name is of one column for ever: else
  rows of before would have two of one name.
- A column that is left out stays in the table, null in new rows. Were it taken out, one that is
  declared under its name later would bring its old values back.
- What is within a struct, an array or a map stays as it is, but for ``old``, which has the columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StructField,
    StructType,
)

from vt_dagster.columns import OLD
from vt_dagster.errors import StorageError
from vt_dagster.topology.column_renames import Names, earlier_names, named, was
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import same

_WHOLE: tuple[type[DataType], ...] = (ByteType, ShortType, IntegerType, LongType)
_FOLLOWED = (
    "What a log follows: a new nullable column, a whole number of more bytes, float to double, "
    "a decimal with more digits before the point, another order, a column that is left out, one that "
    "is declared as renamed={'before': 'now'}"
)


@dataclass(frozen=True)
class Evolution:
    """What becomes of a table's columns when rows of others are added.

    Args:
        columns: those that the table has then: its own, in their order, and new ones after them.
        added: the new ones.
        widened: those that have a longer type then, ``price: int -> bigint``.
        dropped: those that were declared before and are not now.
        renamed: those that have another name then, ``price -> cost``.
        refused: why it cannot be, in words; empty = it can.
    """

    columns: StructType
    added: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What changes, in a sentence; empty where nothing does."""
        parts = [f"new and null in rows before: {', '.join(self.added)}"] if self.added else []
        parts += [f"now longer: {', '.join(self.widened)}"] if self.widened else []
        parts += [f"renamed: {', '.join(self.renamed)}"] if self.renamed else []
        parts += [f"null from now on: {', '.join(self.dropped)}"] if self.dropped else []
        return f"columns change: {'; '.join(parts)}" if parts else ""


def evolve(
    then: StructType,
    now: StructType,
    *,
    fixed: Collection[str] = (),
    required: Collection[str] = (),
    declared: Sequence[str] | None = None,
    derived: bool = False,
) -> Evolution:
    """What becomes of a table's columns.

    Args:
        then: the columns that it has, with the names that they had before.
        now: those of the rows to come, likewise; a type that only Spark can tell (NullType) fits.
        fixed: columns that keep their type: of the key, and what else says where a record belongs.
        required: columns that may not be null, so that rows before cannot lack them.
        declared: the user's columns before; None = not known, all of ``then``.
        derived: whether they follow from the columns of inputs, of which each was asked itself whether
            one was renamed.
    """
    table, names = _Columns(then), {f.name.lower() for f in now.fields}
    before = {f.name for f in then.fields} if declared is None else set(declared)
    added: list[StructField] = []
    told: dict[str, list[str]] = {"widened": [], "renamed": [], "refused": []}
    for field in now.fields:
        home, wrong = table.home(field, names)
        if wrong:
            told["refused"].append(wrong)
        elif home is None:
            if not isinstance(field.dataType, NullType):
                added.append(StructField(field.name, field.dataType))
                if field.name in required:
                    told["refused"].append(
                        f"{field.name} is new and may not be null, but is in no row before"
                    )
        elif home.name == OLD:
            inner = evolve(_struct(home), _struct(field), declared=())
            table.kept[OLD] = StructField(OLD, inner.columns)
            told["refused"] += [one for one in inner.refused if one not in told["refused"]]
        else:
            kind = field.dataType
            if isinstance(kind, NullType) or same(home.dataType, kind):
                kind = home.dataType
            else:
                change = _said(field.name, home.dataType, kind)
                if not widens(home.dataType, kind):
                    told["refused"].append(change)
                elif field.name in fixed:
                    told["refused"].append(f"{change}, by which records find their key or partition")
                else:
                    told["widened"].append(change)
            if home.name != field.name:
                told["renamed"].append(f"{home.name} -> {field.name}")
            table.put(home, field.name, kind)
    gone = [f for f in then.fields if f.name in before and not table.known(f.name, names)]
    told["refused"] += [] if derived else _renamed(gone, added)
    return Evolution(
        StructType([*table.kept.values(), *added]),
        tuple(f.name for f in added),
        dropped=tuple(f.name for f in gone),
        **{what: tuple(dict.fromkeys(said)) for what, said in told.items()},
    )


class _Columns:
    """The columns of a table, each with the names by which rows of before know it."""

    def __init__(self, then: StructType) -> None:
        self.kept = {f.name: f for f in then.fields}
        self._names = {f.name.lower(): f.name for f in then.fields}
        self._homes = {name.lower(): f.name for f in then.fields for name in was(f)}

    def home(self, field: StructField, now: Collection[str]) -> tuple[StructField | None, str]:
        """The column that a declared one is, by its name or an earlier one; and why it cannot be."""
        name, before = field.name, {n.lower() for n in was(field)}
        there = self._names.get(name.lower())
        if there is not None and there != name:
            return None, f"{there} is {name} now, which to most engines is another column"
        asked = [name.lower(), *before]
        homes = {self._homes.get(n, self._names.get(n)) for n in asked}
        found = [field for home, field in self.kept.items() if home in homes]
        if len(found) > 1:
            return None, (
                f"{' and '.join(f.name for f in found)} are to be one column, {name}, but are two, and "
                "each has values of its own"
            )
        if not found:
            return None, ""
        (home,) = found
        if home.name != name and home.name.lower() in now:
            return None, (
                f"{name} is the name by which rows of before know {home.name}, and no other column can "
                "have it"
            )
        if home.name != name and home.name.lower() not in before and not before & self._known_as(home):
            return None, (
                f"{home.name} is gone and {name} is there again, by which rows of before know it: if "
                f"it has that name again, declare renamed={{{home.name!r}: {name!r}}}"
            )
        return home, ""

    def put(self, home: StructField, name: str, kind: DataType) -> None:
        """A column with the name and type that it has from now on."""
        if home.name == name:
            self.kept[name] = named(name, kind, was(home))
            return
        self.kept[home.name] = StructField(home.name, home.dataType)
        others = [n for n in (home.name, *was(home)) if n != name]
        self.kept[name] = named(name, kind, others)
        self._homes |= {n.lower(): name for n in others}
        self._homes.pop(name.lower(), None)

    def known(self, name: str, now: Collection[str]) -> bool:
        """Whether a column is there by a name of now."""
        return self._homes.get(name.lower(), name).lower() in now

    def _known_as(self, home: StructField) -> set[str]:
        return {n.lower() for n in was(home)}


def evolved(name: str, then: StructType, now: StructType, **about: Any) -> Evolution:
    """The same for a table of this name, see :func:`evolve`.

    Raises:
        StorageError: it cannot be; names the columns, both types, and what to do.
    """
    found = evolve(then, now, **about)
    if found.refused:
        raise StorageError(
            f"{name}: expected columns that what is stored can be read by, got other ones: "
            f"{'; '.join(found.refused)}. {_FOLLOWED}. Declare it as it was, give what is new another "
            "name, or make the asset anew beside the old one (vt-dagster replay) and swap"
        )
    return found


def widens(then: DataType, now: DataType) -> bool:
    """Whether each value of a type is one of another type, in which every engine reads it."""
    if isinstance(then, _WHOLE) and isinstance(now, _WHOLE):
        return _WHOLE.index(type(then)) < _WHOLE.index(type(now))
    if isinstance(then, DecimalType) and isinstance(now, DecimalType):
        return then.scale == now.scale and then.precision < now.precision
    return isinstance(then, FloatType) and isinstance(now, DoubleType)


def never_null(node: Stream) -> set[str]:
    """The columns that a schema says are never null; of a pandera model, as long as it does not say
    that they may be."""
    if hasattr(node.contract, "to_schema"):
        columns = node.contract.to_schema().columns
        return {name for name, column in columns.items() if not column.nullable}
    return {f.name for f in node.schema.fields if not f.nullable}


def without_earlier_names(columns: StructType) -> StructType:
    """A table's columns as its readers see them, each under its newest name."""
    gone = earlier_names(columns)
    kept = [f for f in columns.fields if f.name not in gone]
    return StructType(
        [
            StructField(OLD, without_earlier_names(_struct(f)))
            if f.name == OLD and isinstance(f.dataType, StructType)
            else StructField(f.name, f.dataType)
            for f in kept
        ]
    )


def by_newest_names(rows: DataFrame, columns: StructType) -> DataFrame:
    """Rows as files have them, with each column under its newest name.

    Plan: a projection, where a column has been renamed; a row has a value under one of its names.

    Args:
        columns: those of the rows, with the names that they had before.
    """
    told: dict[str, Column] = {}
    for field in columns.fields:
        if was(field):
            told[field.name] = _newest(F.col, field, columns)
        elif field.name == OLD and isinstance(field.dataType, StructType):
            inner, old = field.dataType, F.col(OLD)
            gone = earlier_names(inner)
            if gone:
                parts = [f for f in inner.fields if f.name not in gone]
                whole = F.struct(*[_newest(old.getField, f, inner).alias(f.name) for f in parts])
                told[OLD] = F.when(old.isNotNull(), whole)
    return rows.withColumns(told).drop(*earlier_names(columns)) if told else rows


def _newest(value: Callable[[str], Column], field: StructField, among: StructType) -> Column:
    names = [n for n in (field.name, *was(field)) if n in among.names]
    return F.coalesce(*[value(n).cast(field.dataType) for n in names])


def kept_by_newest_names(state: DataFrame, names: Names) -> DataFrame:
    """What an operator has kept, where columns have been renamed since; within aggregated rows too.

    Args:
        names: by column those that it had before.
    """
    now = {old: new for new, before in names.items() for old in before}
    if not now:
        return state

    def one(field: StructField) -> Column:
        column = F.col(f"`{field.name}`")
        if isinstance(field.dataType, StructType):
            inner = [StructField(now.get(f.name, f.name), f.dataType) for f in field.dataType.fields]
            column = column.cast(StructType(inner))
        return column.alias(now.get(field.name, field.name))

    return state.select(*[one(f) for f in state.schema.fields])


def require_said(name: str, found: Evolution, inputs: Sequence[StructType]) -> None:
    """What an input's column has been renamed to must still be declared when the result follows.

    Args:
        found: what becomes of the result's columns.
        inputs: the columns of the inputs' logs.

    Raises:
        StorageError: it is not, so that rows before would have null.
    """
    renamed = {
        old: f.name
        for columns in inputs
        for f in columns.fields
        for old in was(f)
        if f.name in found.added and old in found.dropped
    }
    if renamed:
        raise StorageError(
            f"{name}: expected that its input still says which columns it has renamed, got no word of "
            f"{renamed}, but its rows have the old names: declare renamed={renamed} there again, until "
            "this has run"
        )


def mentions(expression: str, column: str) -> bool:
    """Whether SQL text has a column's name in it."""
    return re.search(rf"(?<!\w){re.escape(column)}(?!\w)", expression, re.IGNORECASE) is not None


def _renamed(dropped: Sequence[StructField], added: Sequence[StructField]) -> list[str]:
    """One gone and another new is what a renamed column looks like: rows before would have nulls."""
    found: list[str] = []
    for old in dropped:
        for new in added:
            if same(old.dataType, new.dataType) or widens(old.dataType, new.dataType):
                found.append(
                    f"{old.name} is gone and {new.name} is new: if it is the same column, declare "
                    f"renamed={{{old.name!r}: {new.name!r}}}, as rows before would have null for "
                    f"{new.name}; if they are two things, leave one out in one run and add the other "
                    "in a later one"
                )
    return found


def _said(name: str, then: DataType, now: DataType) -> str:
    return f"{name}: {then.simpleString()} -> {now.simpleString()}"


def _struct(field: StructField) -> StructType:
    assert isinstance(field.dataType, StructType)
    return field.dataType
