"""Erases a key from an asset, from assets derived from it under that key, and from exports.

**Rows of the key.** Its log rows are removed, and the commit counts the missing rows (``erased``).
Offsets of all other rows, stream times and system times do not change: positions of consumers remain
valid, and no answer for another key changes. A placeholder row would need a key of its own, and every
operator would have to handle it. If a table with another key has the erased key among its values, its
row becomes a tombstone, because the versions of that other key must not change.

**Order of writes.** Inputs first, each table in one commit that is a batch of its own: a run that
started earlier is refused. Each step is idempotent, and the certificate counts the work of each, so
that the same call completes a killed erase.

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

import contextlib
import hashlib
import itertools
import json
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, PrivateAttr
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from vt_dagster.columns import IS_TOMBSTONE, LOG_COLUMNS, OFFSET, OLD, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.core.arrival_order import Outcome, by_partition
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import RAW, SOURCE
from vt_dagster.errors import SourceError, StorageError
from vt_dagster.runs.audit import checks_of
from vt_dagster.runs.commit_document import next_system_time
from vt_dagster.runs.export import last_export
from vt_dagster.sources.base import read_by_all_names
from vt_dagster.sources.consumed_files import FileInfo, Memory
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import is_small, small_run
from vt_dagster.storage import delta, erase_files, iceberg, parquet
from vt_dagster.storage.arrow_reader import as_key, asset_names, head_of, restate_folder
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import ERASE, Checkpoint, Commit, Erasure, bases_of
from vt_dagster.storage.delta import address
from vt_dagster.storage.erase_files import Found, Key, Marked, Way
from vt_dagster.storage.maintenance import is_older
from vt_dagster.storage.spark_reader import Head
from vt_dagster.storage.stale_reads import forget_replaced
from vt_dagster.storage.view import stored_as
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological

# Erase plan


KEPT = (
    "derived without the key's columns: its counts, and groups named after a value of the key, remain "
    "until it is made anew (vt-dagster replay and swap, or restate)"
)
KEPT_EXPORT = "it does not have the key's columns: remove it, and its next run writes it anew"
KEPT_ICEBERG = (
    "an Iceberg table: its next run writes it anew without the key; then expire its earlier snapshots, "
    "and remove the files that no snapshot has"
)


@dataclass(frozen=True)
class Places:
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
    def _under_it(self) -> bool:
        return {*self.columns.values()} <= {*self.node.key}

    @property
    def way_of_log(self) -> Way:
        """A table's row under another key becomes a tombstone: that key's versions must not change."""
        return "empty" if isinstance(self.node, Table) and not self._under_it else "remove"

    @property
    def way_of_view(self) -> Way:
        """Like :attr:`way_of_log`, but only the view of a versioned table keeps tombstones."""
        return self.way_of_log if isinstance(self.node, VersionedTable) else "remove"

    @property
    def values(self) -> list[str]:
        """The value columns, which are null in a tombstone."""
        return [c for c in self.node.schema.names if c not in (*self.node.key, *LOG_COLUMNS)]

    def marked(self, key: Key) -> Marked:
        """See ``erase_files.find``."""

        def marked(rows: DataFrame) -> DataFrame:
            return key.within(rows, self.columns)

        return marked

    def in_export(self, path: str) -> bool:
        """Whether an export in Delta has the key's columns."""
        names = {*delta.require_table(path).schema().to_arrow().names}
        return bool(self.columns) and {*self.columns.values()} <= names


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
            f"{name}: expected one --key for each of the key columns {list(types)}, got {len(values)} "
            "value(s); give one for each column"
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


def derived(warehouse: str, node: Stream, nodes: Sequence[Stream]) -> list[Places]:
    """Returns an asset and all assets derived from it, inputs first.

    Raises:
        StorageError: a derived asset is not among the definitions.
    """
    found = [Places(node, {k: k for k in node.key})]
    known = {node.name: found[0].columns}
    for one in topological(nodes):
        if one.name in known or not any(up.name in known for up in one.inputs):
            continue
        columns = _columns(one, known)
        known[one.name] = columns
        found.append(Places(one, columns))
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


def published(commit: Commit) -> list[str]:
    """Returns the topics of a publication's commit; empty for any other asset."""
    return [up.removeprefix("topic ") for up in commit.inputs if up.startswith("topic ")]


def _columns(node: Stream, known: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns an asset's columns that hold the key, derived from those of its inputs."""
    operator: Any = node.operator
    lineage = operator.lineage()
    for up in node.inputs:
        theirs = known.get(up.name)
        if not theirs:
            continue
        found: dict[str, str] = {}
        for key, column in theirs.items():
            # Prefer the column of the same name; if the result has the key twice, either will do.
            made = [c for c in node.schema.names if (up.name, column) in lineage.get(c, [])]
            made.sort(key=lambda c: (len(lineage[c]), c not in node.key, c != column))
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
    return next((c for c, of in operator.lineage().items() if of == [left]), None)


def exported(plan: Sequence[Places], path: str) -> Places:
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
        f"{'one of ' + ', '.join(whose) if whose else 'none'}; leave it out, or erase there too"
    )


def require_free(warehouse: str, node: Stream) -> None:
    """Refuses an erase while an interrupted restatement has new tables of the asset.

    Raises:
        StorageError: a restatement was interrupted.
    """
    place = posixpath.join(warehouse, restate_folder(node.path))
    fs, local = delta.filesystem(place)
    if fs.exists(local):
        raise StorageError(
            f"{node.name}: expected no restatement in progress, got {place}; complete it first: run "
            "vt-dagster restate again with the same arguments"
        )


# Erase certificate


FOLDER = "erased.certificates"
"""Folder in a warehouse; no asset can have this name."""


class Searched(BaseModel):
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

    def __init__(
        self,
        rows: int = 0,
        erased: int = 0,
        old: int = 0,
        version: int | None = None,
        files: int | None = 0,
    ) -> None:
        super().__init__(rows=rows, erased=erased, old=old, version=version, files=files)

    def __str__(self) -> str:
        files = "unknown number of files" if self.files is None else f"{self.files} files"
        return f"{self.erased} of {self.rows} rows, {self.old} old rows, {files}"


class Certificate(BaseModel):
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
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """The file of the certificate; empty for a dry run."""
        return self._path

    def add(self, table: str, found: Searched) -> None:
        """Adds the result for a table to that of earlier attempts."""
        before = self.searched.get(table, Searched())
        sums: dict[str, int] = {"erased": before.erased + found.erased, "old": before.old + found.old}
        if found.files is not None:
            sums["files"] = (before.files or 0) + found.files
        self.searched[table] = found.model_copy(update=sums)
        self.save()

    def finish(self) -> None:
        """Marks the erase as finished."""
        self.finished = _now()
        self.save()

    def save(self) -> None:
        """Writes the document atomically; a dry run writes nothing."""
        if not self._path:
            return
        fs, local = delta.filesystem(self._path)
        with parquet.writing(self._path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(f"{local}.part", self.model_dump_json(indent=2).encode())
            fs.mv(f"{local}.part", local)


def begun(warehouse: str, asset: str, request: Sequence[Any], reason: str) -> Certificate:
    """Returns the certificate of an interrupted attempt at the same erase, or a new one."""
    folder = posixpath.join(warehouse, FOLDER)
    fs, local = delta.filesystem(folder)
    names = fs.ls(local, detail=False) if fs.exists(local) else []
    for name in sorted(map(posixpath.basename, names)):
        if not name.endswith(".json"):
            continue
        found = Certificate.model_validate_json(fs.cat_file(posixpath.join(local, name)))
        if found.finished is None and found.key_sha256 == _hash(found.salt, request):
            found._path = posixpath.join(folder, name)
            return found
    made = unwritten(asset, request, reason)
    made._path = posixpath.join(folder, f"{made.started[:19].replace(':', '')}-{made.id}.json")
    made.save()
    return made


def unwritten(asset: str, request: Sequence[Any], reason: str) -> Certificate:
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


def elsewhere(
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
        columns = _suspects(parquet.schema(path) if rows is None else rows.schema, key)
        if not columns:
            continue
        rows = parquet.read(spark, path) if rows is None else rows
        counted = [F.count_if(hit).alias(column) for column, hit in columns.items()]
        counts = rows.agg(*counted).collect()[0]
        found += [
            f"{name}: {counts[column]} rows have the key in {column}, which is not derived from the "
            f"erased asset: erase it there too (vt-dagster erase … {name}), or replay and swap {name}"
            for column in columns
            if counts[column]
        ]
    return found


def _suspects(columns: StructType, key: Key) -> dict[str, Column]:
    """Returns, by column, the condition that a row has the key there."""
    types = {f.name: f.dataType for f in columns.fields}
    if key.values is not None and [*map(type, key.values)] == [str]:
        inside = types.get(OLD)
        texts = [f"`{name}`" for name, kind in types.items() if isinstance(kind, StringType)]
        if isinstance(inside, StructType):
            texts += [f"{OLD}.`{f.name}`" for f in inside if isinstance(f.dataType, StringType)]
        return {c.replace("`", ""): F.col(c).eqNullSafe(F.lit(key.values[0])) for c in texts}
    if not {*key.types} <= {*types}:
        return {}
    return {", ".join(key.types): key.condition()}


# Erased validity


SPANS, ERASURES = 16, 64
"""Limits on intervals per erase and erases per log; beyond these, intervals and erases are merged."""
_EVER = 2**63 - 1


def erasures(store: AssetStore, head: Head, marked: Marked, found: Found) -> list[Erasure]:
    """Returns the earlier erases of a log and the new one, with the validity of its erased rows.

    Args:
        head: the log before the erase.
        found: the erased rows of the log.

    Plan: one pass over the view, and a window over the erased rows.
    """
    commit = head.commit
    if not isinstance(store.node, VersionedTable):
        return []
    spans = _spans(store, head, marked)
    if not spans and found.first is None:
        return commit.erasures
    own = Erasure(batch=commit.batch + 1, spans=spans, first=found.first, last=found.last)
    return _bounded([*commit.erasures, own], commit)


def _spans(store: AssetStore, head: Head, marked: Marked) -> list[tuple[int, int]]:
    """Returns when an erased key had a value: [from, to), epoch microseconds; adjacent ones merged."""
    at = store.snapshot()
    rows = marked(store.view_at(at)).where(F.col("_hit") & ~F.col(IS_TOMBSTONE))
    low = F.unix_micros(VALID_FROM)
    high = F.coalesce(F.unix_micros(VALID_TO), F.lit(_EVER))
    spans = rows.select(low.alias("low"), high.alias("high"))
    before = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, -1)
    begins = (F.col("low") > F.max("high").over(before)).cast("int")
    upto = Window.orderBy("low", "high").rowsBetween(Window.unboundedPreceding, 0)
    counted = spans.withColumn("begins", F.coalesce(begins, F.lit(1)))
    merged = counted.withColumn("span", F.sum("begins").over(upto)).groupBy("span")
    merged_spans = merged.agg(F.min("low").alias("low"), F.max("high").alias("high")).orderBy("low")
    # The last interval covers all that follow it, to bound their number.
    last = F.least(F.col("span"), F.lit(SPANS))
    few = merged_spans.groupBy(last.alias("place")).agg(
        F.min("low").alias("low"), F.max("high").alias("high")
    )
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


# Erase residuals


_NAMED = 20
_LONGEST = 32
"""Delta's statistics keep this many characters of a text."""


def erase_residuals(
    warehouse: str,
    plan: Sequence[Places],
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
            f"delete it there, {again}. A file changed in place is read as a new one: write the "
            "cleaned file elsewhere"
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
            f"landing files: {len(gone):,} that {node.name} was read from are no longer in "
            f"{source.path}, {_named(gone, key)}: if they were moved, delete the key there"
        )
    if counts:
        yield (
            f"landing files: {len(counts):,} of {len(there):,} in {source.path} have the key, "
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


def _topics(warehouse: str, plan: Sequence[Places]) -> Iterator[str]:
    """Yields the topics that the assets are published to."""
    nodes = {one.node.name: one for one in plan}
    for name in asset_names(warehouse):
        commit = head_of(warehouse, name)[1]
        for topic in published(commit):
            for one in (nodes[up] for up in commit.inputs if up in nodes):
                key = "{" + ", ".join(f'"{k}": …' for k in one.node.key) + "}"
                own = {*one.columns.values()} <= {*one.node.key}
                whose = "its key" if own else "each key that had it"
                yield (
                    f"the topic {topic}, to which {name} has published {one.name} up to its offsets "
                    f"{commit.inputs[one.node.name]}: if it is compacted, publish a tombstone of "
                    f"{whose}, {key} without a value; else wait for its retention, or delete its "
                    "records up to there (kafka-delete-records)"
                )


def _events(plan: Sequence[Places], runs: Sequence[str] | None) -> str:
    """Returns the residuals in Dagster's events: samples of checks, and pictures in metadata."""
    assets = "; ".join(
        f"{one.name} with its checks {', '.join(check.name for check in checks_of(one.node))}"
        for one in plan
    )
    names = " ".join(one.name for one in plan)
    if runs is None:
        which = "all earlier runs (with DAGSTER_HOME set, an erase by --key finds those with the key)"
    elif runs:
        which = f"the {len(runs):,} run(s) whose events have the key: {', '.join(runs)}"
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
        texts.append(clean if rows is None else f"{clean} ({rows[name]:,} rows)")
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
        sides.append({_whole(str(one), values.get(k)) for one in ends if one is not None})
    return {*itertools.product(*sides)}


def _whole(text: str, value: Any) -> str:
    """Returns the key's value if the statistics have its truncated prefix; else the text."""
    cut = isinstance(value, str) and len(text) >= _LONGEST and value.startswith(text[:_LONGEST])
    return value if cut else text


def _statistics(path: str) -> Iterator[dict[str, Any]]:
    fs, root = delta.filesystem(path)
    for name in delta.log_files(path):
        place = posixpath.join(root, "_delta_log", name)
        texts = list[Any]()
        if delta.COMMIT_FILE.fullmatch(name):
            actions = [json.loads(line) for line in fs.cat_file(place).decode().splitlines() if line]
            texts = [(one.get("add") or one.get("remove") or {}).get("stats") for one in actions]
        elif name.endswith(".checkpoint.parquet"):
            with fs.open(place) as file:
                rows = pq.read_table(file).to_pylist()
            texts = [(row.get("add") or {}).get("stats") for row in rows]
        yield from (json.loads(one) for one in texts if one)


# Erase dry run


Tell = Callable[[str], None]


def erase_dry_run(
    warehouse: str,
    spark: SparkSession,
    key: Key,
    plan: Sequence[Places],
    exports: Mapping[str, Places],
    done: Certificate,
    say: Tell,
) -> dict[str, DataFrame]:
    """Adds to ``done`` what an erase would find.

    Args:
        plan: the erased asset and the assets derived from it.
        exports: by path, the exported asset.
        done: the certificate that collects the results.

    Returns:
        by asset, the log rows that the erase would leave.
    """
    left: dict[str, DataFrame] = {}

    def note(table: str, searched: Searched) -> None:
        done.add(table, searched)
        say(f"{table}: {searched}")

    for one in plan:
        store = AssetStore(warehouse, one.node, spark, None)
        head = store.head()
        if not one.columns:
            done.kept[one.name] = KEPT
        elif head is not None:
            for table, searched in _asset(store, head, one, key, of_source=one is plan[0]):
                note(f"{one.name}/{table}", searched)
            rows = parquet.read(spark, store.log_path, head.version, like=log_schema(one.node))
            left[one.name] = erase_files.without(rows, one.marked(key), one.way_of_log, one.values)
    for path, one in exports.items():
        if iceberg.is_reference(path):
            done.kept[path] = KEPT_ICEBERG
            continue
        if not one.in_export(path):
            done.kept[path] = KEPT_EXPORT
            continue
        there = delta.last_commit(path)
        assert there is not None
        note(path, _searched(erase_files.find(spark, path, there.version, one.marked(key))))
    for name, why in done.kept.items():
        say(f"! {name}: {why}")
    return left


def _asset(
    store: AssetStore, head: Head, one: Places, key: Key, of_source: bool
) -> Iterator[tuple[str, Searched]]:
    """Yields the results of one asset, by table."""
    spark, marked = store.spark, one.marked(key)
    log = erase_files.find(spark, store.log_path, head.version, marked, log_schema(one.node))
    yield "log", _searched(log)
    if isinstance(one.node, Table):
        like = stored_as(one.node, store.log_path)
        at = store.snapshot()
        is_there = at.base is not None and at.base.is_view and not at.tail
        if not is_there:
            counts = [F.count(F.lit(1)), F.count_if("_hit"), F.count_if(F.col("_old_hit"))]
            rows, hits, old = marked(store.view_at(at)).agg(*counts).collect()[0]
            yield "view", Searched(rows, hits, old, files=None)
        for path in (*([store.view_path] if is_there else []), *bases_of(store.root)):
            there = delta.last_commit(path)
            assert there is not None
            found = erase_files.find(spark, path, there.version, marked, like)
            yield "view" if path == store.view_path else "base", _searched(found)
    rejected = delta.last_commit(store.quarantine_path) if of_source else None
    if rejected is not None and one.node.operator is None and key.values:
        found = erase_files.find(spark, store.quarantine_path, rejected.version, key.in_text)
        yield "quarantine", _searched(found)


def _searched(found: Found) -> Searched:
    return Searched(found.searched, found.rows, found.old, files=len(found.places))


# Erase


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
            ``among``; a restatement is in progress.
        ConcurrentRunError: another run committed meanwhile. Run the erase again.
    """
    exports = [*map(address, exports)]
    arguments = address(warehouse), node, spark, reason, key, where, among, exports, tell, runs
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
            raise StorageError("expected a reason for the erase, got none; give one, without the key")
        self.key = key_of(AssetStore(warehouse, node, spark), key, where)
        self.nodes = [node, *among]
        self.plan = derived(warehouse, node, self.nodes)
        for one in self.plan:
            require_free(warehouse, one.node)
        self.exports = {path: exported(self.plan, path) for path in exports}
        name = posixpath.join(*node.path)
        request = [name, self.key.values, where]
        self.done = (
            unwritten(name, request, reason) if dry_run else begun(warehouse, name, request, reason)
        )

    def run(self) -> Certificate:
        # Views, exports and consumed files have about as many rows as their logs.
        logs = (posixpath.join(self.warehouse, name, "log") for name in asset_names(self.warehouse))
        there = (one for one in map(delta.last_commit, logs) if one is not None)
        rows = sum(Commit.model_validate(one.document).total for one in there)
        with small_run(self.spark, is_small(0, rows)):
            return self._run()

    def _run(self) -> Certificate:
        left = dict[str, DataFrame]()
        if self.dry_run:
            look = self.warehouse, self.spark, self.key, self.plan, self.exports
            left = erase_dry_run(*look, self.done, self.say)
        else:
            self._erase()
        self.done.elsewhere = elsewhere(self.warehouse, self.key, self.spark, left)
        self.done.unreachable = erase_residuals(
            self.warehouse, self.plan, self.key, self.spark, self.runs
        )
        if not self.dry_run:
            self.done.waiting = {}
            self.done.finish()
        for line in (*self.done.elsewhere, *self.done.unreachable):
            self.say(f"! {line}")
        return self.done

    def _erase(self) -> None:
        self._assets(self.plan)
        for path, one in self.exports.items():
            self._export(path, one)
        # A consumer's first run that read the key refuses to commit from the first erase on, see
        # ``require_inputs_unchanged``. One that committed before was not there when the plan was made.
        known = {one.name for one in self.plan}
        new = [o for o in derived(self.warehouse, self.node, self.nodes) if o.name not in known]
        self._assets(new)
        self.plan += new

    def _assets(self, some: Sequence[Places]) -> None:
        for one in some:
            if not one.columns:
                self.done.kept[one.name] = KEPT
                continue
            self._asset(one)

    # -- an asset --------------------------------------------------------------------------------

    def _asset(self, one: Places) -> None:
        store = AssetStore(self.warehouse, one.node, self.spark, None)
        # First: the quarantine is written from staged data, which may have the key and is removed
        # below.
        store.catch_up(now=True)
        head = store.head()
        if head is None:
            return
        marked = one.marked(self.key)
        # Before the rows are erased: the commits of joins that buffer them subtract their number.
        self._note_waiting(store, head, marked)
        # The log first: its commit is the next batch, so a concurrent run is refused from here on.
        after = self._log(store, head, one, marked)
        committed = time.time()
        bases = bases_of(store.root)
        for path in (store.view_path, *bases) if isinstance(one.node, Table) else ():
            if delta.exists(path):
                self._view(store, path, after, one, marked)
        # An operator's quarantine has offsets of records only, no values.
        of_source = one.node is self.node and one.node.operator is None
        if of_source and delta.exists(store.quarantine_path) and self.key.values:
            self._quarantine(store, after)
        removed = _forget_attempts(store, committed)
        for path in (store.log_path, store.view_path, *bases, store.quarantine_path):
            if delta.exists(path):
                removed += self._purge(path, after.batch, one)
        forget_replaced(self.warehouse, one.name, timedelta(0))
        self.done.files_removed += removed
        self.done.save()

    def _log(self, store: AssetStore, head: Head, one: Places, marked: Marked) -> Commit:
        found = erase_files.find(self.spark, store.log_path, head.version, marked, log_schema(one.node))
        attempt, commit = store.new_attempt(), head.commit
        self._stage(store, head, one, marked, attempt)
        after = self._after(commit, attempt, one, found)
        after.staged, after.erasures = store.staged(attempt), erasures(store, head, marked, found)
        # An earlier attempt was killed between its commit and the certificate: count its rows too.
        again = commit.run_id == after.run_id and f"{one.name}/log" not in self.done.searched
        before = commit.counts.get(_ROWS, 0) if again else 0
        after.counts[_ROWS] = found.rows + before
        erase_files.rewrite(
            self.spark,
            store.log_path,
            head.version,
            found,
            marked,
            one.way_of_log,
            one.values,
            document=after.model_dump(),
            asset=one.node.name,
            after=commit.attempt,
        )
        found.rows += before
        self._tell(f"{one.name}/log", found)
        return after

    def _stage(self, store: AssetStore, head: Head, one: Places, marked: Marked, attempt: str) -> None:
        """Stages the last run's state and consumed files for the next run, without the key."""
        state = store.state(head)
        if state is not None:
            hit = marked(store.log({}, head)).where("_hit")
            state = processor_of(one.node).state_after_erase(state, hit)
            if {*one.columns.values()} <= {*state.columns}:
                state = erase_files.without(state, marked)
            store.stage_state(attempt, state)
        if head.commit.files:
            store.stage_files(attempt, store.consumed_files(head))

    def _after(self, commit: Commit, attempt: str, one: Places, found: Found) -> Commit:
        """Returns the commit of the erase: the last commit's positions, and the erased rows."""
        gone = found.by_partition if one.way_of_log == "remove" else {}
        totals = dict(commit.totals)
        waiting = commit.counts.get(Outcome.WAITING, 0)
        run_id = f"{ERASE}{self.done.id}"
        counted = 0 if commit.run_id == run_id else self.done.waiting.get(one.name, 0)
        lost = min(waiting, counted)
        if lost:
            totals[Outcome.WAITING] = totals.get(Outcome.WAITING, 0) - lost
            totals["in"] = totals.get("in", 0) - lost
            totals["erased"] = totals.get("erased", 0) + lost
        ends = {p: commit.next_offset.get(p, 0) for p in gone}
        after = commit.successor(
            attempt,
            run_id,
            previous="",  # its attempt had rows of the key and is removed
            # If the source provides system times, the erase must not be recorded before later ones.
            recorded_at=next_system_time(commit, commit.recorded_at if commit.stepped else None),
            totals=totals,
            erased={p: commit.erased.get(p, 0) + gone.get(p, 0) for p in {*commit.erased, *gone}},
            erased_before={**commit.erased_before, **ends},
        )
        if waiting:
            after.counts[Outcome.WAITING] = waiting - lost
        return after

    def _note_waiting(self, store: AssetStore, head: Head, marked: Marked) -> None:
        """Counts erased records that joins still buffer, so that the joins' record counts add up."""
        for other in self.plan:
            there = AssetStore(self.warehouse, other.node, self.spark).head()
            if (
                there is None
                or not there.commit.counts.get(Outcome.WAITING)
                or not there.commit.emitted_up_to
            ):
                continue
            taken = there.commit.inputs.get(store.node.name)
            if taken is None:
                continue
            out = by_partition(there.commit.emitted_up_to, "long")
            waits = F.coalesce(F.unix_micros(TIMESTAMP) > out, F.lit(True))
            ours = F.col(OFFSET) < F.coalesce(by_partition(taken, "long"), F.lit(0))
            count = marked(store.log({}, head)).where("_hit").where(waits & ours).count()
            if count:
                self.done.waiting[other.name] = count
                self.done.save()

    def _view(self, store: AssetStore, path: str, after: Commit, one: Places, marked: Marked) -> None:
        there = delta.last_commit(path)
        assert there is not None
        like = stored_as(one.node, store.log_path)
        found = erase_files.find(self.spark, path, there.version, marked, like)
        of_base = path != store.view_path
        if found.places:
            then = Checkpoint.model_validate(there.document)
            about = {"batch": after.batch, "attempt": uuid4().hex, "log_attempt": after.attempt}
            about |= {"written": int(time.time() * 1e6)}
            erase_files.rewrite(
                self.spark,
                path,
                there.version,
                found,
                marked,
                one.way_of_view,
                one.values,
                document=then.model_copy(update=about).model_dump(),
                asset=f"{one.node.name}:{'base' if of_base else 'view'}",
                parted=isinstance(one.node, VersionedTable) and not of_base,
            )
        self._tell(f"{one.name}/{'base' if of_base else 'view'}", found)

    def _quarantine(self, store: AssetStore, after: Commit) -> None:
        there = delta.last_commit(store.quarantine_path)
        assert there is not None
        found = erase_files.find(self.spark, store.quarantine_path, there.version, self.key.in_text)
        if found.places:
            then = Checkpoint.model_validate(there.document)
            rows = store.quarantine()
            assert rows is not None
            hits = self.key.in_text(rows).where("_hit").groupBy("reason").count().collect()
            erased = dict(then.erased)
            for row in hits:
                erased[row["reason"]] = erased.get(row["reason"], 0) + row["count"]
            about = {"batch": after.batch, "attempt": after.attempt, "erased": erased}
            erase_files.rewrite(
                self.spark,
                store.quarantine_path,
                there.version,
                found,
                self.key.in_text,
                "remove",
                (),
                document=then.model_copy(update=about).model_dump(),
                asset=store.node.name,
            )
        self._tell(f"{posixpath.join(*store.node.path)}/quarantine", found)

    # -- an export -------------------------------------------------------------------------------

    def _export(self, path: str, one: Places) -> None:
        if iceberg.is_reference(path):
            iceberg.renew(path)
            self.done.kept[path] = KEPT_ICEBERG
            self.say(f"! {path}: {KEPT_ICEBERG}")
            return
        there = delta.last_commit(path)
        assert there is not None
        if not one.in_export(path):
            self.done.kept[path] = KEPT_EXPORT
            return
        marked = one.marked(self.key)
        found = erase_files.find(self.spark, path, there.version, marked)
        then = Commit.model_validate(there.document)
        about = {
            "batch": then.batch + 1,
            "attempt": uuid4().hex,
            "run_id": f"{ERASE}{self.done.id}",
            "taken": {},
            "counts": {"in": 0},
        }
        erase_files.rewrite(
            self.spark,
            path,
            there.version,
            found,
            marked,
            "remove",
            (),
            document=then.model_copy(update=about).model_dump(),
            asset=then.asset,
        )
        self._tell(path, found)
        self.done.files_removed += self._purge(path, then.batch + 1, one)
        self.done.save()

    def _purge(self, path: str, batch: int, one: Places) -> int:
        removed = erase_files.purge(path, batch)
        columns = {} if path.endswith("/quarantine") else one.columns
        left = in_statistics(self.spark, path, self.key, columns)
        self.done.statistics[path.removeprefix(f"{self.warehouse.rstrip('/')}/")] = left
        return removed

    def _tell(self, table: str, found: Found) -> None:
        searched = Searched(found.searched, found.rows, found.old, found.version, len(found.places))
        self.done.add(table, searched)
        self.say(f"{table}: {searched}")


def _forget_attempts(store: AssetStore, until: float) -> int:
    """Removes staged files of earlier runs, except those of the last commit, which the next run needs.

    Args:
        until: time of the erase's commit, epoch seconds; attempts staged later are kept.
    """
    head = store.head()
    assert head is not None
    fs, attempts = delta.filesystem(posixpath.join(store.root, "attempts"))
    removed = 0
    if not fs.exists(attempts):
        return 0
    for path in fs.ls(attempts, detail=False, refresh=True):
        name = posixpath.basename(path.rstrip("/"))
        age = timedelta(seconds=max(0.0, time.time() - until))
        if name != head.commit.attempt and is_older(posixpath.join(store.root, "attempts", name), age):
            with contextlib.suppress(FileNotFoundError):
                removed += sum(name.endswith(".parquet") for name in fs.find(path))
                fs.rm(path, recursive=True)
    return removed
