"""Erases a key from an asset, from assets derived from it under that key, and from exports.

**Rows of the key.** Its log rows are removed, and the commit counts the missing rows (``erased``).
Offsets of all other rows, stream times and system times do not change: positions of consumers remain
valid, and no answer for another key changes. A placeholder row would need a key of its own, and every
operator would have to handle it. If a table with another key has the erased key among its values, its
row becomes a tombstone, because the versions of that other key must not change.

**Order of writes.** Inputs first, each table in one commit (``storage.rewrite``). The certificate is
the intent of the erase: it counts the work of each step, and the same call completes a killed erase.

**Certificate.** It lists the tables searched, and the places where copies of the key may remain that no
erase reaches, with what to do there. It contains no value of the key. The validity intervals of the
removed versions are kept, so that stale reads can be reported: only times, of all keys together.

**Dry run.** It reports what an erase would remove now, and writes nothing. It searches the same tables
in the same way as an erase, so both report the same rows unless something runs in between. An erase
first brings a view up to its log. For a view behind its log, the dry run therefore counts the rows that
readers see, without expired rows that its files may still have; the number of files is unknown.
Rejected records of a killed run are found only after another run has moved them into the quarantine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import posixpath
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial, reduce
from math import isfinite
from operator import or_
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    AtomicType,
    CharType,
    DataType,
    DecimalType,
    NumericType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from vt_dagster.columns import IS_TOMBSTONE, LOG_COLUMNS, OLD, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.core.arrival_order import Outcome, by_partition, with_columns
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import RAW, SOURCE
from vt_dagster.errors import SourceError, StorageError, counted
from vt_dagster.runs.audit import checks_of
from vt_dagster.runs.commit_document import next_system_time
from vt_dagster.runs.export import last_export
from vt_dagster.runs.restate import require_free
from vt_dagster.sources.base import read_by_all_names
from vt_dagster.sources.consumed_files import FileInfo, Memory
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import is_small, small_run
from vt_dagster.storage import delta, iceberg, parquet, rewrite
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import ERASE, Checkpoint, Commit, Erasure, bases_of, published
from vt_dagster.storage.delta import address, place_of
from vt_dagster.storage.maintenance import remove_attempts
from vt_dagster.storage.rewrite import HIT, OLD_HIT, EraseMode, Found, Intent, Target
from vt_dagster.storage.spark_reader import Head
from vt_dagster.storage.spark_reader import before as consumed_before
from vt_dagster.storage.stale_reads import remove_replaced
from vt_dagster.storage.values import as_key
from vt_dagster.storage.view import stored_as
from vt_dagster.topology.durations import epoch_micros
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological

# What to erase


KEPT = (
    "derived without the key's columns: its counts, its values of erased rows, and groups named after "
    "one, remain until it is recomputed (vt-dagster replay and swap, or restate)"
)
KEPT_EXPORT = "it does not have the key's columns: remove it, and its next run creates it again"
KEPT_ICEBERG = (
    "an Iceberg table: its next run writes the whole table without the key; then expire its earlier "
    "snapshots, and remove the files that no snapshot has"
)


@dataclass(frozen=True)
class Key:
    """The key or keys to erase.

    Args:
        types: key columns with their types.
        values: one for each column; None = ``where`` alone selects the keys.
        where: SQL condition over the key columns.
    """

    types: Mapping[str, DataType]
    values: tuple[Any, ...] | None = None
    where: str | None = None

    def condition(self) -> Column:
        """Returns the condition on rows that have the key columns."""
        given = zip(self.types.items(), self.values or (), strict=False)
        found = [F.col(f"`{c}`").eqNullSafe(_literal(v, kind)) for (c, kind), v in given]
        if self.where is not None:
            found.append(F.expr(f"({self.where})"))
        return F.coalesce(reduce(lambda a, b: a & b, found), F.lit(False))

    def within(self, rows: DataFrame, places: Mapping[str, str]) -> DataFrame:
        """Returns rows with ``_hit`` (the row has the key) and ``_old_hit`` (its old row has the key).

        Args:
            places: by key column, the column of ``rows`` that holds it.
        """
        found = self._flagged(rows, HIT, {k: f"`{c}`" for k, c in places.items()})
        old = rows.schema[OLD].dataType if OLD in rows.columns else None
        if not {*places.values()} <= {*getattr(old, "names", ())}:
            return found.withColumn(OLD_HIT, F.lit(False))
        return self._flagged(found, OLD_HIT, {k: f"{OLD}.`{c}`" for k, c in places.items()})

    def in_text(self, rows: DataFrame) -> DataFrame:
        """Returns quarantined records with the flags of :meth:`within`: a record matches if its text
        contains each value of the key as a word."""
        assert self.values is not None
        texts = [F.col(c).cast("string") for c in ("raw", "raw_key") if c in rows.columns]
        return rows.withColumns({HIT: self.among_words(texts), OLD_HIT: F.lit(False)})

    def among_words(self, texts: Sequence[Column]) -> Column:
        """Returns the condition that texts contain each value of the key as a word; false without
        ``values``."""
        whole = F.concat_ws("\n", *texts)
        given = zip(self.types.values(), self.values or (), strict=False)
        found = [_has_word(whole, *part) for kind, value in given for part in _parts(value, kind)]
        return reduce(lambda a, b: a & b, found or [F.lit(False)])

    def _flagged(self, rows: DataFrame, name: str, places: Mapping[str, str]) -> DataFrame:
        # The row is packed into a struct: one of its columns may have the name of a key column.
        row = F.struct(*[F.col(f"`{c}`") for c in rows.columns]).alias("_row")
        keys = [F.col(place).alias(k) for k, place in places.items()]
        return rows.select(row, *keys).withColumn(name, self.condition()).select("_row.*", name)


def _literal(value: Any, kind: DataType) -> Column:
    """Returns a value as an expression. ``F.lit`` takes no struct, and no date before the year 1000."""
    if value is not None and isinstance(kind, StructType):
        return F.struct(*[_literal(value[f.name], f.dataType).alias(f.name) for f in kind.fields])
    if value is not None and isinstance(kind, ArrayType):
        return F.array(*[_literal(one, kind.elementType) for one in value]).cast(kind)
    return F.lit(value.isoformat() if type(value) is date else value).cast(kind)


def _parts(value: Any, kind: DataType) -> list[tuple[Any, DataType]]:
    """Returns the atomic values in a value, with their types; a null is none."""
    if value is None:
        return []
    if isinstance(kind, StructType):
        return [part for f in kind.fields for part in _parts(value[f.name], f.dataType)]
    if isinstance(kind, ArrayType):
        return [part for one in value for part in _parts(one, kind.elementType)]
    return [(value, kind)]


# Not the numbers in a date or a time, which every record has.
_NUMBER = r"(?<![\w.])(?<!\d[-:])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?!\.?\w|[-:]\d)"
_TIME = (
    r"(?<!\w)[-+]?\d{4,}-\d\d?-\d\d?(?:[T ]\d\d?:\d\d?(?::\d\d?(?:\.\d+)?)?)?"
    r"(?: ?(?:Z|UTC|GMT|[-+]\d\d?(?::?\d\d)?))?(?!\w)"
)

_TIME_IN_ZONE = (
    r"(?<!\w)\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?"
    r" (?:[A-Z][A-Za-z]+(?:/[\w+-]+)+|[A-Z]{3,4})(?!\w)"
)
"""A local time with the name of its zone: ``2024-01-05 10:30:00 Europe/Berlin``."""


def _has_word(text: Column, value: Any, kind: DataType) -> Column:
    """Returns the condition that a text contains an atomic value as a word. Numbers and times are
    compared as values: sources may write them in several ways."""
    if isinstance(value, date):
        if isinstance(value, datetime):
            found = [_has_value(text, pattern, value, kind) for pattern in (_TIME, _TIME_IN_ZONE)]
        else:
            found = [text.rlike(rf"(?<!\w){value.isoformat()}Z?(?!\w)")]
        return reduce(or_, [*found, *[_has_number(text, number) for number in _numbers_of(value)]])
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return _has_number(text, value)
    if isinstance(value, float) and isfinite(value):
        return _has_value(text, _NUMBER, value, kind)
    written = _quoted(b64encode(value).decode() if isinstance(value, bytes) else str(value))
    word = f"(?i:{value})" if isinstance(value, bool) else written
    return text.rlike(rf"(?<!\w){word}(?!\w)")


def _numbers_of(value: date) -> list[int | Decimal]:
    """Returns the numbers by which sources write a time or a date: a time since 1970 in each unit; a
    date as days since 1970, and as its digits (``20240105``)."""
    if not isinstance(value, datetime):
        return [(value - date(1970, 1, 1)).days, int(value.strftime("%Y%m%d"))]
    found = [Decimal(epoch_micros(value)).scaleb(digits) for digits in (-6, -3, 0, 3)]
    return [number for number in found if abs(number) >= _FEWEST]


_FEWEST = 100_000
"""Smaller numbers are not searched for as times: in seconds they are times on 1 January 1970."""


def _has_number(text: Column, value: int | Decimal) -> Column:
    # The type has as many digits after the point as possible, so that no number is rounded to equal
    # another one.
    whole = max(Decimal(value).adjusted() + 1, 1)
    return _has_value(text, _NUMBER, value, DecimalType(38, max(38 - whole, 0)))


def _has_value(text: Column, pattern: str, value: Any, kind: DataType) -> Column:
    found = F.regexp_extract_all(text, F.lit(pattern), F.lit(0))
    return F.exists(found, lambda word: word.try_cast(kind).eqNullSafe(_literal(value, kind)))


def _quoted(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text)


@dataclass(frozen=True)
class KeyColumns:
    """The columns of one asset that hold the key.

    Args:
        columns: by key column of the erased asset, the column that has its value; empty = none.
    """

    node: Stream
    columns: dict[str, str]

    @property
    def name(self) -> str:
        """The asset's folder in the warehouse."""
        return posixpath.join(*self.node.path)

    @property
    def is_keyed_by_it(self) -> bool:
        """Whether the columns that hold the key are a part of the asset's own key."""
        return {*self.columns.values()} <= {*self.node.key}

    @property
    def log_erase_mode(self) -> EraseMode:
        """A table's row under another key becomes a tombstone, because the versions of that key must
        not change. Other rows are removed."""
        return "empty" if isinstance(self.node, Table) and not self.is_keyed_by_it else "remove"

    @property
    def view_erase_mode(self) -> EraseMode:
        """Like :attr:`log_erase_mode`, but only the view of a versioned table keeps tombstones."""
        return self.log_erase_mode if isinstance(self.node, VersionedTable) else "remove"

    @property
    def values(self) -> list[str]:
        """The value columns, which are null in a tombstone."""
        return [c for c in self.node.schema.names if c not in (*self.node.key, *LOG_COLUMNS)]

    def kept_in(self, export: str) -> str | None:
        """Returns why an erase does not search an export; None = it does."""
        if iceberg.is_reference(export):
            return KEPT_ICEBERG
        names = {*delta.require_table(export).schema().to_arrow().names}
        return None if self.columns and {*self.columns.values()} <= names else KEPT_EXPORT


def key_of(store: AssetStore, values: Sequence[object] | None, where: str | None) -> Key:
    """Returns the given key, with values in the types of the asset's key columns.

    Raises:
        StorageError: the values do not fit the asset's key, or ``where`` is no condition over its
            key columns.
    """
    node, name = store.node, posixpath.join(*store.node.path)
    types = dict(zip(node.key, node.key_types, strict=True))
    if values is None and where is None:
        raise StorageError(f"{name}: expected a key or a condition to erase by, got none; give --key")
    if values is not None and len(values) != len(types):
        raise StorageError(
            f"{name}: expected one --key for each of the key columns {list(types)}, got "
            f"{counted(len(values), 'value')}; give one for each column"
        )
    if where is not None:
        columns = StructType([StructField(k, kind) for k, kind in types.items()])
        empty = store.spark.createDataFrame([], columns)
        try:
            _ = empty.where(f"({where})").schema
        except PySparkException as error:
            raise StorageError(
                f"{name}: expected --where to be a condition over the key columns {list(types)}, got "
                f"{one_line(error)}; correct it"
            ) from error
    if values is None:
        return Key(types, None, where)
    stored = pa.schema(delta.require_table(store.log_path).schema().to_arrow())
    given = zip(types, values, strict=True)
    names = {k: {k, *node.earlier.get(k, ())} for k in types}
    kinds = {k: next(f.type for f in stored if f.name in known) for k, known in names.items()}
    typed = tuple(as_key(k, v, kinds[k]).as_py() for k, v in given)
    return Key(types, typed, where)


def derived(warehouse: str, node: Stream, nodes: Sequence[Stream]) -> list[KeyColumns]:
    """Returns an asset and all assets derived from it, inputs first.

    Raises:
        StorageError: a derived asset is not among the definitions.
    """
    found = [KeyColumns(node, {k: k for k in node.key})]
    known = {node.name: found[0].columns}
    for one in topological(nodes):
        if one.name in known or not any(up.name in known for up in one.inputs):
            continue
        columns = _columns(one, known)
        known[one.name] = columns
        found.append(KeyColumns(one, columns))
    names = {one.name for one in found}
    for name in asset_names(warehouse):
        commit = head_of(warehouse, name)[1]
        if published(commit):
            continue  # a publication has no rows of its own
        reads = {posixpath.dirname(read).rpartition("/")[2] for read in commit.reads}
        used = sorted((names & ({*commit.inputs} | reads)) - {commit.asset})
        if used and name not in {one.name for one in found}:
            raise StorageError(
                f"{node.name}: expected the definitions of all its consumers, got none of {name}, "
                f"which is derived from {used[0]}; add its definition (--module)"
            )
    return [one for one in found if delta.exists(posixpath.join(warehouse, one.name, "log"))]


def _columns(node: Stream, known: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns an asset's columns that hold the key, derived from those of its inputs."""
    operator: Any = node.operator
    copied = operator.copied()  # a computed column has other values, which a search would not find
    for up in node.inputs:
        theirs = known.get(up.name)
        if not theirs:
            continue
        found: dict[str, str] = {}
        for key, column in theirs.items():
            # Prefer the column of the same name; if the result has the key twice, either will do.
            made = [c for c in node.schema.names if (up.name, column) in copied.get(c, [])]
            made.sort(key=lambda c: (len(copied[c]), c not in node.key, c != column))
            other = _joined(node, up, column)
            if made or other:
                found[key] = other or made[0]
        if len(found) == len(theirs):
            return found
    return {}


def _joined(node: Stream, up: Any, column: str) -> str | None:
    """Returns the column of a join's result that equals a key column of the right side."""
    operator: Any = node.operator
    if getattr(operator, "right", None) is not up or column not in up.key:
        return None
    place = up.key.index(column)
    foreign: tuple[str, ...] = getattr(operator, "foreign_key", ())
    if not foreign and node.key == operator.left.key:
        return str(node.key[place])
    # Rows of a corrected join have another key than their records: use the lineage.
    left = (operator.left.name, (foreign or operator.left.key)[place].strip("`"))
    return next((c for c, of in operator.copied().items() if of == [left]), None)


def exported(plan: Sequence[KeyColumns], path: str) -> KeyColumns:
    """Returns the asset that an export is made from.

    Raises:
        StorageError: none of the erased assets is exported there.
    """
    found = last_export(path)
    whose = [] if found is None else [*found.logs]
    for one in plan:
        if one.node.name in whose:
            return one
    raise StorageError(
        f"expected an export of one of {[one.name for one in plan]} in {path}, got "
        f"{'one of ' + ', '.join(whose) if whose else 'none'}; leave it out, or "
        "erase the key from its own asset too"
    )


# Certificate


FOLDER = "erased.certificates"
"""Folder in a warehouse; no asset can have this name."""


@dataclass
class Searched:
    """The result for one table, summed over all attempts of an interrupted erase.

    Args:
        rows: number of rows searched; ``erased``: rows removed or turned into tombstones; ``old``: rows
            whose ``old`` was erased.
        version: the table's version after the erase, if it was rewritten.
        files: number of rewritten files that had the key; None = unknown in a dry run.
    """

    rows: int = 0
    erased: int = 0
    old: int = 0
    version: int | None = None
    files: int | None = 0

    @classmethod
    def of(cls, found: Found) -> Searched:
        """Returns the result of a search, or of the rewrite after it."""
        return cls(found.searched, found.rows, found.old, found.version, len(found.places))

    def __str__(self) -> str:
        files = "unknown number of files" if self.files is None else counted(self.files, "file")
        rows, old = counted(self.rows, "row"), counted(self.old, "old row")
        return f"{self.erased:,} of {rows}, {old}, {files}"


class Certificate(Intent):
    """The document of one erase."""

    id: str
    asset: str
    reason: str
    salt: str
    key_sha256: str
    """SHA-256 of the salt and the JSON of ``[asset, key, where]``."""
    started: str
    finished: str | None = None
    """None = the erase was interrupted (run it again), or it was a dry run."""
    searched: dict[str, Searched] = Field(default_factory=dict)
    """By table of the warehouse (``prices/log``), or export."""
    files_removed: int = 0
    kept: dict[str, str] = Field(default_factory=dict)
    """Derived assets that were not searched, with the reason."""
    elsewhere: list[str] = Field(default_factory=list)
    """Other assets of the warehouse that still have the key's value."""
    unreachable: list[str] = Field(default_factory=list)
    """Places of possible copies that no erase reaches, and how to remove these: landing files, topics,
    Dagster's event storage, Delta's statistics."""
    statistics: dict[str, int] = Field(default_factory=dict)
    """By table: how many files in its ``_delta_log`` still have the key as minimum or maximum in their
    statistics after the erase."""
    waiting: dict[str, int] = Field(default_factory=dict)
    """During the erase: by join, how many buffered records the erase removes."""

    def add(self, table: str, found: Searched) -> None:
        """Adds the result for a table to that of earlier attempts."""
        before = self.searched.get(table, Searched())
        sums: dict[str, int] = {"erased": before.erased + found.erased, "old": before.old + found.old}
        if found.files is not None:
            sums["files"] = (before.files or 0) + found.files
        self.searched[table] = replace(found, **sums)
        self.save()


def open_certificate(warehouse: str, asset: str, request: Sequence[Any], reason: str) -> Certificate:
    """Returns the certificate of an interrupted attempt at the same erase, or a new one."""
    folder = posixpath.join(warehouse, FOLDER)
    for name in sorted(delta.names_in(folder)):
        found = Certificate.read(posixpath.join(folder, name)) if name.endswith(".json") else None
        if found and found.finished is None and found.key_sha256 == _hash(found.salt, request):
            return found
    made = new_certificate(asset, request, reason)
    made.save(posixpath.join(folder, f"{made.started[:19].replace(':', '')}-{made.id}.json"))
    return made


def new_certificate(asset: str, request: Sequence[Any], reason: str) -> Certificate:
    """Returns a new certificate that is not written to a file, for a dry run."""
    salt = uuid4().hex
    return Certificate(
        id=uuid4().hex,
        asset=asset,
        reason=reason,
        salt=salt,
        key_sha256=_hash(salt, request),
        started=_now(),
    )


def _hash(salt: str, request: Sequence[Any]) -> str:
    return hashlib.sha256((salt + json.dumps(request, default=str)).encode()).hexdigest()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def find_other_copies(
    warehouse: str, key: Key, spark: SparkSession, left: Mapping[str, DataFrame] = {}
) -> list[str]:
    """Returns the logs of a warehouse that still have the key in columns with the key's names; a key of
    one text column is searched in all text columns.

    Args:
        left: for a dry run, by asset: the log rows that the erase would leave.

    Plan: one pass over these columns of each log.
    """
    found: list[str] = []
    for name in asset_names(warehouse):
        path = posixpath.join(warehouse, name, "log")
        rows = left.get(name)
        schema = parquet.schema(path) if rows is None else rows.schema
        columns = _conditions_by_column(schema, key)
        if not columns:
            continue
        rows = parquet.read(spark, path) if rows is None else rows
        rows = with_columns(rows, _of_other_types(schema, key))
        sums = [F.count_if(hit).alias(column) for column, hit in columns.items()]
        counts = rows.agg(*sums).collect()[0]
        found += [
            f"{name}: {counted(counts[column], 'row has', 'rows have')} the key in {column}, which is "
            f"not derived from the erased asset: erase it there too (vt-dagster erase … {name}), or "
            f"replay and swap {name}"
            for column in columns
            if counts[column]
        ]
    return found


def _conditions_by_column(columns: StructType, key: Key) -> dict[str, Column]:
    """Returns by column, or by all key columns together, the condition that a row has the key there."""
    types = {f.name: f.dataType for f in columns.fields}
    if key.values is not None and [*map(type, key.values)] == [str]:
        inside = types.get(OLD)
        texts = [f"`{name}`" for name, kind in types.items() if isinstance(kind, StringType)]
        if isinstance(inside, StructType):
            texts += [f"{OLD}.`{f.name}`" for f in inside if isinstance(f.dataType, StringType)]
        return {c.replace("`", ""): F.col(c).eqNullSafe(F.lit(key.values[0])) for c in texts}
    if not {*key.types} <= {*types}:
        return {}
    if not all(isinstance(kind, AtomicType) for kind in _unlike(columns, key).values()):
        return {}  # no text has such a value
    return {", ".join(key.types): key.condition()}


def _of_other_types(columns: StructType, key: Key) -> dict[str, Column]:
    """Converts columns that have the key's names, but types that Spark may refuse to compare, to the
    key's types; null = the value does not fit."""
    unlike = _unlike(columns, key)
    texts = {c: F.col(f"`{c}`").cast("string") for c in unlike}
    return {c: text if _is_text(unlike[c]) else text.try_cast(unlike[c]) for c, text in texts.items()}


def _unlike(columns: StructType, key: Key) -> dict[str, DataType]:
    """Returns the key's type by column, for columns that have the key's names, but types that Spark may
    refuse to compare with it."""
    types = {f.name: f.dataType for f in columns.fields}
    return {
        c: kind for c, kind in key.types.items() if c in types and not _are_comparable(types[c], kind)
    }


def _are_comparable(one: DataType, other: DataType) -> bool:
    numbers = isinstance(one, NumericType) and isinstance(other, NumericType)
    return numbers or (_is_text(one) and _is_text(other)) or one.simpleString() == other.simpleString()


def _is_text(kind: DataType) -> bool:
    return isinstance(kind, StringType | CharType | VarcharType)


# Validity of erased versions


SPANS, ERASURES = 16, 64
"""Limits on intervals per erase and erases per log; beyond these, intervals and erases are merged."""
_EVER = 2**63 - 1


def erasures(store: AssetStore, head: Head, log: Target, found: Found) -> list[Erasure]:
    """Returns the earlier erases of a log and the new one, with the validity of its erased rows.

    Args:
        head: the log before the erase.
        found: the erased rows of the log.

    Plan: one pass over the view, and a window over the erased rows.
    """
    commit = head.commit
    if not isinstance(store.node, VersionedTable):
        return []
    spans = _spans(store, log)
    if not spans and found.first is None:
        return commit.erasures
    own = Erasure(batch=commit.batch + 1, spans=spans, first=found.first, last=found.last)
    return _bounded([*commit.erasures, own], commit)


def _spans(store: AssetStore, log: Target) -> list[tuple[int, int]]:
    """Returns when an erased key had a value: [from, to), epoch microseconds; adjacent ones merged."""
    at = store.snapshot()
    rows = log.marked(store.view_at(at)).where(F.col("_hit") & ~F.col(IS_TOMBSTONE))
    low = F.unix_micros(VALID_FROM)
    high = F.coalesce(F.unix_micros(VALID_TO), F.lit(_EVER))
    spans = rows.select(low.alias("low"), high.alias("high"))
    before = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, -1)
    begins = (F.col("low") > F.max("high").over(before)).cast("int")
    upto = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, 0)
    counted = spans.withColumn("begins", F.coalesce(begins, F.lit(1)))
    merged = counted.withColumn("span", F.sum("begins").over(upto)).groupBy("span")
    ends = F.min("low").alias("low"), F.max("high").alias("high")
    merged_spans = merged.agg(*ends).orderBy("low")
    # The last interval covers all that follow it, to bound their number.
    last = F.least(F.col("span"), F.lit(SPANS))
    few = merged_spans.groupBy(last.alias("place")).agg(*ends)
    return [(row["low"], row["high"]) for row in few.orderBy("low").collect()]


def _bounded(some: list[Erasure], commit: Commit) -> list[Erasure]:
    while len(some) > ERASURES:
        one, other, *rest = some
        ends = [end for found in (one, other) for span in found.spans for end in span]
        first = [found.first for found in (one, other) if found.first is not None]
        last = {p: max(one.last.get(p, -1), other.last.get(p, -1)) for p in commit.next_offset}
        both = Erasure(
            batch=other.batch,
            spans=[(min(ends), max(ends))] if ends else [],
            first=min(first, default=None),
            last={p: offset for p, offset in last.items() if offset >= 0},
        )
        some = [both, *rest]
    return some


# Copies that no erase reaches


_NAMED = 20
_LONGEST = 32
"""Number of characters of a text that Delta's statistics keep."""


def erase_residuals(
    warehouse: str,
    plan: Sequence[KeyColumns],
    key: Key,
    spark: SparkSession,
    runs: Sequence[str] | None = None,
) -> list[str]:
    """Returns a line per place of possible copies that no erase reaches, with the remedy.

    Args:
        plan: the erased asset and the assets derived from it.
        runs: the Dagster runs whose events have the key; None = not searched.

    Plan: for a directory of files, one pass over the consumed files.
    """
    found = [*_source(AssetStore(warehouse, plan[0].node, spark), key)]
    found += _topics(warehouse, plan)
    found.append(_events(plan, runs))
    found.append("backups, and copies that others have made: they are not known here")
    return found


def _source(store: AssetStore, key: Key) -> Iterator[str]:
    """Yields the residuals in the asset's source."""
    head, node = store.head(), store.node
    if head is None:
        return
    again = "a replay would bring it back"
    if head.commit.topics:
        names = ", ".join(sorted(head.commit.topics))
        yield (
            f"what {node.name} was read from, {names}: delete it there, {again}. In a compacted topic "
            "publish a tombstone, a record of its key without a value; else wait for its retention"
        )
    if head.commit.start is not None:
        dump = _named([head.commit.start.what], key)
        yield f"the snapshot that {node.name} started with, {dump}: delete it there, {again}"
    if head.commit.files:
        taken = store.consumed_files(head)
        mend = (
            f"delete it there, {again}. A run refuses a file that was changed in place: move the file "
            "away and write the cleaned one to another directory, or restate the asset after the change"
        )
        yield from _files(store, taken, key, mend)


def _files(store: AssetStore, taken: Mapping[str, Any], key: Key, mend: str) -> Iterator[str]:
    node, source = store.node, store.node.source
    if not isinstance(source, FilesSource):
        yield f"what {node.name} was read from, {_named([*taken], key)}: {mend}"
        return
    try:
        there = source.files()
        counts = _rows_by_file(store, source, there, key) if there else {}
    except SourceError as error:
        yield f"what {node.name} was read from, {_named([*taken], key)}: {mend}. Not searched: {error}"
        return
    fs, root = delta.filesystem(str(source.path))
    home = fs.unstrip_protocol(root).rstrip("/") + "/"
    gone = [
        path.removeprefix(home) if path.startswith(home) else posixpath.basename(path)
        for path in Memory(taken, there).gone()
    ]
    if gone:
        yield (
            f"landing files: {counted(len(gone), 'is', 'are')} no longer in {source.path}, of those "
            f"that {node.name} was read from, {_named(gone, key)}: if moved, delete the key there"
        )
    if counts:
        yield (
            f"landing files: the key is in {len(counts):,} of {len(there):,} in {source.path}, "
            f"{_named([*counts], key, counts)}: {mend}"
        )


def _rows_by_file(
    store: AssetStore, source: FilesSource, files: Sequence[FileInfo], key: Key
) -> dict[str, int]:
    """Returns how many records of each file have the key, in key columns or as a word of the text."""
    read = read_by_all_names(store.node, lambda _, columns: source.read(store.spark, files, columns))
    rows = read.select(SOURCE, RAW, *[F.col(f"`{k}`") for k in key.types])
    hits = rows.where(key.condition() | key.among_words([F.col(RAW)]))
    return {row[SOURCE]: row["count"] for row in hits.groupBy(SOURCE).count().collect()}


def _topics(warehouse: str, plan: Sequence[KeyColumns]) -> Iterator[str]:
    """Yields the topics that the assets are published to."""
    nodes = {one.node.name: one for one in plan}
    for name in asset_names(warehouse):
        commit = head_of(warehouse, name)[1]
        for topic in published(commit):
            for one in (nodes[up] for up in commit.inputs if up in nodes):
                key = "{" + ", ".join(f'"{k}": …' for k in one.node.key) + "}"
                whose = "its key" if one.is_keyed_by_it else "each key that had it"
                yield (
                    f"the topic {topic}, to which {name} has published {one.name} up to its offsets "
                    f"{commit.inputs[one.node.name]}: if it is compacted, publish a tombstone of "
                    f"{whose}, {key} without a value; else wait for its retention, or delete its "
                    "records up to there (kafka-delete-records)"
                )


def _events(plan: Sequence[KeyColumns], runs: Sequence[str] | None) -> str:
    """Returns the residuals in Dagster's events: samples of checks, and pictures in metadata."""
    assets = "; ".join(
        f"{one.name} with its checks {', '.join(check.name for check in checks_of(one.node))}"
        for one in plan
    )
    names = " ".join(one.name for one in plan)
    if runs is None:
        which = "all earlier runs (with DAGSTER_HOME set, an erase by --key finds those with the key)"
    elif runs:
        which = f"the {counted(len(runs), 'run')} whose events have the key: {', '.join(runs)}"
    else:
        return f"Dagster's event storage: no event of a run of these assets has the key ({names})"
    return (
        "Dagster's event storage, where samples of failed checks and pictures in metadata may have the "
        f"key, of {assets}. Delete {which} (dagster run delete), with their events and logs; and the "
        f"results of checks, with all history of the assets (dagster asset wipe {names}). The database "
        "keeps the bytes of deleted rows until it is vacuumed"
    )


def _named(names: Sequence[str], key: Key, rows: Mapping[str, int] | None = None) -> str:
    """Returns some names of files, with values of the key masked."""
    texts = list[str]()
    for name in sorted(names)[:_NAMED]:
        clean = name
        for value in key.values or ():
            clean = clean.replace(value, "…") if isinstance(value, str) and value else clean
        texts.append(clean if rows is None else f"{clean} ({counted(rows[name], 'row')})")
    left = len(names) - len(texts)
    return ", ".join(texts) + (f" and {left:,} more" if left else "")


# ------------------------------------------------------------------------------ Delta's statistics


def in_statistics(spark: SparkSession, path: str, key: Key, columns: Mapping[str, str]) -> int:
    """Counts the file statistics in a table's ``_delta_log``, also of earlier versions, that have the
    key as minimum or maximum.

    Args:
        columns: by key column, the table's column; empty = search the key's values in all texts.
    """
    if not columns:
        texts = [json.dumps(statistics, ensure_ascii=False) for statistics in _statistics(path)]
        words = [str(value) for value in key.values or ()]
        return sum(bool(words) and all(word in text for word in words) for text in texts)
    kinds = StructType([StructField(k, StringType()) for k in key.types])
    rows = [row for statistics in _statistics(path) for row in _candidates(statistics, key, columns)]
    if not rows:
        return 0
    typed = [F.col(f"`{k}`").cast(kind).alias(k) for k, kind in key.types.items()]
    statistics = spark.createDataFrame(rows, kinds).select(*typed)
    return statistics.where(key.condition()).count()


def _candidates(
    statistics: Mapping[str, Any], key: Key, columns: Mapping[str, str]
) -> set[tuple[str, ...]]:
    """Returns the keys that a file's statistics may stand for."""
    values = dict(zip(key.types, key.values or (), strict=False))
    sides = list[set[str]]()
    for k in key.types:
        both = [statistics.get(side) or {} for side in ("minValues", "maxValues")]
        both += [one.get(OLD) or {} for one in both]
        ends = [one.get(columns[k]) for one in both]
        sides.append({_full_value(str(one), values.get(k)) for one in ends if one is not None})
    return {*itertools.product(*sides)}


def _full_value(text: str, value: Any) -> str:
    """Returns the key's value if the statistics have its truncated prefix; else the text."""
    is_prefix = isinstance(value, str) and len(text) >= _LONGEST and value.startswith(text[:_LONGEST])
    return value if is_prefix else text


def _statistics(path: str) -> Iterator[dict[str, Any]]:
    fs, root = delta.filesystem(path)
    for name in delta.log_files(path):
        place = posixpath.join(root, "_delta_log", name)
        texts = list[Any]()
        if delta.COMMIT_FILE.fullmatch(name):
            actions = [json.loads(line) for line in fs.cat_file(place).splitlines() if line]
            texts = [(one.get("add") or one.get("remove") or {}).get("stats") for one in actions]
        elif name.endswith(".checkpoint.parquet"):
            with fs.open(place) as file:
                rows = pq.read_table(file).to_pylist()
            texts = [(row.get("add") or {}).get("stats") for row in rows]
        yield from (json.loads(one) for one in texts if one)


# Erase


Tell = Callable[[str], None]
_ROWS = "rows_erased"
"""Name of the count of erased rows in the commit of an erase."""


def erase(
    warehouse: str,
    node: Stream,
    spark: SparkSession,
    *,
    reason: str = "",
    key: Sequence[object] | None = None,
    where: str | None = None,
    among: Sequence[Stream] = (),
    exports: Sequence[str] = (),
    tell: Tell | None = None,
    runs: Sequence[str] | None = None,
    dry_run: bool = False,
) -> Certificate:
    """Removes a key from an asset, from assets derived from it under that key, and from exports.

    Erases from logs, views, ``old``, states, attempts and quarantine. Files and commits that had the
    key are removed at once, so that no older version can be read. Aggregates under another key keep
    what they have counted. Run nothing else meanwhile: a concurrent run, or the erase, is refused. To
    complete an interrupted erase, call again with the same arguments.

    Args:
        reason: is written into the certificate, so it must not contain the key. A dry run needs none.
        key: the values of the key columns, also as texts; None = ``where`` alone selects the keys.
        where: a SQL condition over the key columns; quarantined records are searched by ``key`` only.
        among: the streams and tables that may consume the asset.
        exports: the directories of exports of any of these (``build_export``); of an Iceberg table
            ``catalog:schema.table``.
        tell: is called with one line per result.
        runs: ids of the Dagster runs whose events have the key (``runs_with``); None = not searched.
        dry_run: changes nothing and reports what an erase would remove: see ``runs.erase``.

    Returns:
        the certificate, which is also in the warehouse, in ``erased.certificates/``. The certificate of
        a dry run is not written, and not ``finished``.

    Raises:
        StorageError: the asset has never run or has no such key; an asset that consumes it is not in
            ``among``, or needs a replay first; a restatement is in progress.
        ConcurrentRunError: another run committed meanwhile. Run the erase again.
    """
    exports = [*map(address, exports)]
    arguments = place_of(warehouse), node, spark, reason, key, where, among, exports, tell, runs
    return _Erase(*arguments, dry_run).run()


class _Erase:
    def __init__(
        self,
        warehouse: str,
        node: Stream,
        spark: SparkSession,
        reason: str,
        key: Sequence[object] | None,
        where: str | None,
        among: Sequence[Stream],
        exports: Sequence[str],
        tell: Tell | None,
        runs: Sequence[str] | None,
        dry_run: bool,
    ) -> None:
        self.warehouse, self.node, self.spark, self.runs = warehouse, node, spark, runs
        self.say = tell or (lambda _: None)
        self.dry_run = dry_run
        if not dry_run and not reason.strip():
            raise StorageError(
                "expected a reason for the erase, got none; give one that does not contain the key"
            )
        self.key = key_of(AssetStore(warehouse, node, spark), key, where)
        self.nodes = [node, *among]
        self.plan = derived(warehouse, node, self.nodes)
        for one in self.plan:
            require_free(warehouse, one.name)
            # A declaration that its tables refuse does not tell which of their columns have the key.
            AssetStore(warehouse, one.node).snapshot()
        self.exports = {path: exported(self.plan, path) for path in exports}
        name = posixpath.join(*node.path)
        request = [name, self.key.values, where]
        if dry_run:
            self.done = new_certificate(name, request, reason)
        else:
            self.done = open_certificate(warehouse, name, request, reason)

    def run(self) -> Certificate:
        # Views, exports and consumed files have about as many rows as their logs.
        logs = (posixpath.join(self.warehouse, name, "log") for name in asset_names(self.warehouse))
        there = (one for one in map(delta.last_commit, logs) if one is not None)
        rows = sum(Commit.model_validate(one.document).total for one in there)
        with small_run(self.spark, is_small(0, rows)):
            return self._run()

    def _run(self) -> Certificate:
        left = self._preview() if self.dry_run else self._erase()
        self.done.elsewhere = find_other_copies(self.warehouse, self.key, self.spark, left)
        self.done.unreachable = erase_residuals(
            self.warehouse, self.plan, self.key, self.spark, self.runs
        )
        if not self.dry_run:
            self.done.waiting = {}
            self.done.finished = _now()
            self.done.save()
        kept = (f"{name}: {why}" for name, why in self.done.kept.items())
        for line in (*kept, *self.done.elsewhere, *self.done.unreachable):
            self.say(f"! {line}")
        return self.done

    def _targets(self, store: AssetStore, one: KeyColumns) -> Iterator[Target]:
        """Yields the tables of an asset to search: its log, then the existing tables derived from the
        log. The view of a table is always among them, because readers fold the log into it."""
        node, marked = one.node, partial(self.key.within, places=one.columns)
        log, mode, values = log_schema(node), one.log_erase_mode, one.values
        yield Target(f"{one.name}/log", store.log_path, node.name, marked, log, mode, values)
        if isinstance(node, Table):
            about = marked, stored_as(node, store.log_path), one.view_erase_mode, values
            parted = isinstance(node, VersionedTable)
            yield Target(f"{one.name}/view", store.view_path, f"{node.name}:view", *about, parted)
            for base in filter(delta.exists, bases_of(store.root)):
                yield Target(f"{one.name}/base", base, f"{node.name}:base", *about)
        # An operator's quarantine has offsets of records only, no values.
        of_source = node is self.node and node.operator is None
        if of_source and self.key.values and delta.exists(store.quarantine_path):
            name = f"{one.name}/quarantine"
            yield Target(name, store.quarantine_path, node.name, self.key.in_text)

    def _note(self, table: str, searched: Searched) -> None:
        self.done.add(table, searched)
        self.say(f"{table}: {searched}")

    # -- dry run ---------------------------------------------------------------------------------

    def _preview(self) -> dict[str, DataFrame]:
        """Notes what an erase would find; returns, by asset, the log rows that it would leave."""
        left: dict[str, DataFrame] = {}
        for one in self.plan:
            store = AssetStore(self.warehouse, one.node, self.spark, None)
            head = store.head()
            if not one.columns:
                self.done.kept[one.name] = KEPT
            elif head is not None:
                targets = [*self._targets(store, one)]
                for target in targets:
                    self._note(target.name, self._searched(store, target))
                rows = parquet.read(self.spark, store.log_path, head.version, like=targets[0].like)
                left[one.name] = rewrite.without(rows, targets[0])
        for path, one in self.exports.items():
            if (kept := one.kept_in(path)) is not None:
                self.done.kept[path] = kept
            else:
                self._note(path, Searched.of(self._find(self._export_target(path, one))[1]))
        return left

    def _searched(self, store: AssetStore, target: Target) -> Searched:
        at = store.snapshot() if target.path == store.view_path else None
        if at is None or (at.base is not None and at.base.is_view and not at.tail):
            return Searched.of(self._find(target)[1])
        marked = target.marked(store.view_at(at))
        counts = [F.count(F.lit(1)), F.count_if(HIT), F.count_if(F.col(OLD_HIT))]
        rows, hits, old = marked.agg(*counts).collect()[0]
        return Searched(rows, hits, old, files=None)

    def _find(self, target: Target) -> tuple[dict[str, Any], Found]:
        """Returns the document of a table's last commit, and its rows to erase."""
        there = delta.last_commit(target.path)
        assert there is not None
        return there.document, rewrite.find(self.spark, target, there.version)

    # -- erase -----------------------------------------------------------------------------------

    def _erase(self) -> dict[str, DataFrame]:
        self._assets(self.plan)
        for path, one in self.exports.items():
            self._export(path, one)
        # A consumer's first run that read the key refuses to commit from the first erase on, see
        # ``require_inputs_unchanged``. One that committed before was not there when the plan was made.
        known = {one.name for one in self.plan}
        new = [o for o in derived(self.warehouse, self.node, self.nodes) if o.name not in known]
        self._assets(new)
        self.plan += new
        return {}

    def _assets(self, some: Sequence[KeyColumns]) -> None:
        for one in some:
            if not one.columns:
                self.done.kept[one.name] = KEPT
                continue
            self._asset(one)

    def _asset(self, one: KeyColumns) -> None:
        store = AssetStore(self.warehouse, one.node, self.spark, None)
        # First: the quarantine is written from staged data, which may have the key and is removed
        # below.
        store.catch_up(now=True)
        head = store.head()
        if head is None:
            return
        log, *made_of_it = self._targets(store, one)
        # Before the rows are erased: the commits of joins that buffer them subtract their number.
        self._note_waiting(store, head, log)
        # The log first: its commit is the next batch, so a concurrent run is refused from here on.
        after = self._log(store, head, one, log)
        committed = time.time()
        for target in made_of_it:
            if delta.exists(target.path):
                self._table(store, target, after)
        removed = sum(remove_attempts(store.root, committed))
        for path in (store.log_path, store.view_path, *bases_of(store.root), store.quarantine_path):
            if delta.exists(path):
                removed += self._purge(path, after.batch, one)
        remove_replaced(self.warehouse, one.name, timedelta(0))
        self.done.files_removed += removed
        self.done.save()

    def _log(self, store: AssetStore, head: Head, one: KeyColumns, log: Target) -> Commit:
        found = rewrite.find(self.spark, log, head.version)
        after = self._commit_of_erase(store, head, one, log, found)
        # An earlier attempt was killed between its commit and the certificate: count its rows too.
        again = head.commit.run_id == after.run_id and log.name not in self.done.searched
        before = head.commit.counts.get(_ROWS, 0) if again else 0
        after.counts[_ROWS] = found.rows + before
        about = {"after": head.commit.attempt, "before": lambda: store.require_staged(after)}
        rewrite.rewrite(self.spark, log, found, after.model_dump(), **about)
        found.rows += before
        self._note(log.name, Searched.of(found))
        return after

    def _commit_of_erase(
        self, store: AssetStore, head: Head, one: KeyColumns, log: Target, found: Found
    ) -> Commit:
        """Returns the commit of the erase: the last commit's positions, and the erased rows."""
        commit, run_id = head.commit, f"{ERASE}{self.done.id}"
        gone = found.by_partition if log.mode == "remove" else {}
        totals = dict(commit.totals)
        waiting = commit.counts.get(Outcome.WAITING, 0)
        counted = 0 if commit.run_id == run_id else self.done.waiting.get(one.name, 0)
        lost = min(waiting, counted)
        if lost:
            totals[Outcome.WAITING] = totals.get(Outcome.WAITING, 0) - lost
            totals["in"] = totals.get("in", 0) - lost
            totals["erased"] = totals.get("erased", 0) + lost

        def without_key(state: DataFrame) -> DataFrame:
            hit = log.marked(store.log({}, head)).where(HIT)
            state = processor_of(one.node).state_after_erase(state, hit)
            has_it = {*one.columns.values()} <= {*state.columns}
            return rewrite.without(state, replace(log, mode="remove")) if has_it else state

        after = store.successor(
            head,
            store.new_attempt(),
            run_id,
            without_key,
            previous="",  # its attempt had rows of the key and is removed
            # If the source provides system times, the erase must not be recorded before later ones.
            recorded_at=next_system_time(commit, commit.recorded_at if commit.stepped else None),
            totals=totals,
            erased={p: commit.erased.get(p, 0) + gone.get(p, 0) for p in {*commit.erased, *gone}},
            erased_before={**commit.erased_before, **{p: commit.next_offset.get(p, 0) for p in gone}},
            erasures=erasures(store, head, log, found),
        )
        if waiting:
            after.counts[Outcome.WAITING] = waiting - lost
        return after

    def _note_waiting(self, store: AssetStore, head: Head, log: Target) -> None:
        """Counts erased records that joins still buffer, so that the joins' record counts add up."""
        for other in self.plan:
            there = AssetStore(self.warehouse, other.node, self.spark).head()
            taken = None if there is None else there.commit.inputs.get(store.node.name)
            if there is None or taken is None or not there.commit.counts.get(Outcome.WAITING):
                continue
            if not there.commit.emitted_up_to:
                continue
            out = by_partition(there.commit.emitted_up_to, "long")
            waits = F.coalesce(F.unix_micros(TIMESTAMP) > out, F.lit(True)) & consumed_before(taken)
            count = log.marked(store.log({}, head)).where(HIT).where(waits).count()
            if count:
                self.done.waiting[other.name] = count
                self.done.save()

    def _table(self, store: AssetStore, target: Target, after: Commit) -> None:
        """Erases the rows from a table that is derived from the log: view, base or quarantine."""
        document, found = self._find(target)
        if found.places:
            then = Checkpoint.model_validate(document)
            about: dict[str, Any] = {"batch": after.batch, "attempt": uuid4().hex}
            about |= {"log_attempt": after.attempt, "written": int(time.time() * 1e6)}
            if target.path == store.quarantine_path:
                about = {"batch": after.batch, "attempt": after.attempt}
                about["erased"] = self._rejected(store, then.erased)
            rewrite.rewrite(self.spark, target, found, then.model_copy(update=about).model_dump())
        self._note(target.name, Searched.of(found))

    def _rejected(self, store: AssetStore, erased: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of erased rows of the quarantine by reason, with those to erase now."""
        rows = store.quarantine()
        assert rows is not None
        hits = self.key.in_text(rows).where(HIT).groupBy("reason").count().collect()
        return {**erased, **{r["reason"]: erased.get(r["reason"], 0) + r["count"] for r in hits}}

    def _export_target(self, path: str, one: KeyColumns) -> Target:
        whose = delta.last_commit(path)
        assert whose is not None
        marked = partial(self.key.within, places=one.columns)
        return Target(path, path, whose.document["asset"], marked)

    def _export(self, path: str, one: KeyColumns) -> None:
        kept = one.kept_in(path)
        if kept is not None:
            self.done.kept[path] = kept
            if kept == KEPT_ICEBERG:
                iceberg.renew(path)
            return
        target = self._export_target(path, one)
        document, found = self._find(target)
        then = Commit.model_validate(document)
        after = then.successor(uuid4().hex, f"{ERASE}{self.done.id}", previous="")
        rewrite.rewrite(self.spark, target, found, after.model_dump())
        self._note(path, Searched.of(found))
        self.done.files_removed += self._purge(path, after.batch, one)
        self.done.save()

    def _purge(self, path: str, batch: int, one: KeyColumns) -> int:
        removed = rewrite.purge(path, batch)
        columns = {} if path.endswith("/quarantine") else one.columns
        left = in_statistics(self.spark, path, self.key, columns)
        self.done.statistics[path.removeprefix(f"{self.warehouse.rstrip('/')}/")] = left
        return removed
