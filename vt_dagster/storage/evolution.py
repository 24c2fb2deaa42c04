"""How the columns of a live table may change in place: what is followed, and what is refused. No Spark.

A plain Delta table has one schema, and data files keep the columns that they were written with. So what
is followed is what every reader makes the same of: a file without a column gives nulls, and a file with
a shorter number gives that number. Tried with Spark, Arrow, ``deltalake``, Polars and DuckDB:

- whole numbers of more bytes, float to double, a decimal with more digits before the point: all read
  them. More digits *behind* the point Polars refuses to read, so that is refused here.
- A name is all that a file knows a column by. Without column mapping, which few engines read, a
  renamed column would be null in rows of before for everybody but this library: refused.
- A column that is left out stays in the table, null in new rows. Were it taken out, one that is
  declared under its name later would bring its old values back.
- What is within a struct, an array or a map stays as it is, but for ``old``, which has the columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

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
from vt_dagster.topology.model import Stream

_WHOLE: tuple[type[DataType], ...] = (ByteType, ShortType, IntegerType, LongType)
_FOLLOWED = (
    "What a log follows: a new nullable column, a whole number of more bytes, float to double, "
    "a decimal with more digits before the point, another order, a column that is left out"
)


@dataclass(frozen=True)
class Evolution:
    """What becomes of a table's columns when rows of others are added.

    Args:
        columns: those that the table has then: its own, in their order, and new ones after them.
        added: the new ones.
        widened: those that have a longer type then, ``price: int -> bigint``.
        dropped: those that were declared before and are not now.
        refused: why it cannot be, in words; empty = it can.
    """

    columns: StructType
    added: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What changes, in a sentence; empty where nothing does."""
        parts = [f"new and null in rows before: {', '.join(self.added)}"] if self.added else []
        parts += [f"now longer: {', '.join(self.widened)}"] if self.widened else []
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
        then: the columns that it has.
        now: those of the rows to come; a type that only Spark can tell (NullType) fits.
        fixed: columns that keep their type: of the key, and what else says where a record belongs.
        required: columns that may not be null, so that rows before cannot lack them.
        declared: the user's columns before; None = not known, all of ``then``.
        derived: whether they follow from the columns of inputs, of which each was asked itself whether
            one was renamed.
    """
    there = {f.name.lower(): f for f in then.fields}
    names = {f.name.lower() for f in now.fields}
    before = {f.name for f in then.fields} if declared is None else set(declared)
    dropped = [f for f in then.fields if f.name in before and f.name.lower() not in names]
    kept = {f.name: f for f in then.fields}
    added: list[StructField] = []
    widened: list[str] = []
    refused: list[str] = []
    for field in now.fields:
        old = there.get(field.name.lower())
        if isinstance(field.dataType, NullType):
            continue
        if old is None:
            added.append(StructField(field.name, field.dataType))
            if field.name in required:
                refused.append(f"{field.name} is new and may not be null, but is in no row before")
        elif old.name != field.name:
            refused.append(f"{old.name} is {field.name} now, which to most engines is another column")
        elif old.name == OLD:
            inner = evolve(_struct(old), _struct(field), declared=())
            kept[OLD] = StructField(OLD, inner.columns)
            refused += [one for one in inner.refused if one not in refused]
        elif not same(old.dataType, field.dataType):
            change = _said(field.name, old.dataType, field.dataType)
            if not widens(old.dataType, field.dataType):
                refused.append(change)
            elif field.name in fixed:
                refused.append(f"{change}, by which records find their key or partition")
            else:
                kept[field.name] = StructField(field.name, field.dataType)
                widened.append(change)
    refused += [] if derived else _renamed(dropped, added)
    return Evolution(
        StructType([*kept.values(), *added]),
        tuple(f.name for f in added),
        tuple(widened),
        tuple(f.name for f in dropped),
        tuple(dict.fromkeys(refused)),
    )


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


def mentions(expression: str, column: str) -> bool:
    """Whether SQL text has a column's name in it."""
    return re.search(rf"(?<!\w){re.escape(column)}(?!\w)", expression, re.IGNORECASE) is not None


def same(one: DataType, other: DataType) -> bool:
    """Whether two types are the same but for what may be null in them."""
    return nullable(one.jsonValue()) == nullable(other.jsonValue())


def nullable(kind: Any) -> Any:
    """A Spark type's JSON with all fields nullable and without notes, as Delta tables are."""
    if isinstance(kind, dict):
        named = {k: nullable(v) for k, v in kind.items()}
        flags = {"nullable", "containsNull", "valueContainsNull"}
        named.update({flag: True for flag in flags if flag in kind})
        return {**named, "metadata": {}} if "metadata" in kind else named
    return [nullable(one) for one in kind] if isinstance(kind, list) else kind


def _renamed(dropped: Sequence[StructField], added: Sequence[StructField]) -> list[str]:
    """One gone and another new is what a renamed column looks like: rows before would have nulls."""
    found: list[str] = []
    for old in dropped:
        for new in added:
            if same(old.dataType, new.dataType) or widens(old.dataType, new.dataType):
                found.append(
                    f"{old.name} is gone and {new.name} is new: a column cannot be renamed in place, "
                    f"as rows before would have null for {new.name}; keep {old.name} here and rename "
                    f"it downstream ('{old.name} as {new.name}'), or, if they are two things, leave "
                    "one out in one run and add the other in a later one"
                )
    return found


def _said(name: str, then: DataType, now: DataType) -> str:
    return f"{name}: {then.simpleString()} -> {now.simpleString()}"


def _struct(field: StructField) -> StructType:
    assert isinstance(field.dataType, StructType)
    return field.dataType
