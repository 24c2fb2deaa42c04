"""Builds a training set, and rebuilds it from the positions in its manifest.

The set is a Delta table outside of the warehouse, written as a whole in one commit. Its manifest is
stored in that commit, and as ``_manifests/<batch>.json`` beside the data: the logs and their positions,
the declaration, the number of rows, and a hash of the rows that does not depend on their order.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, IS_TOMBSTONE, OFFSET, TIMESTAMP
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.source_records import as_json
from vt_dagster.core.stream_table_join import Feature, matched_by, with_features
from vt_dagster.core.table_store import as_read
from vt_dagster.errors import StorageError, counted
from vt_dagster.runs.commit_document import next_system_time
from vt_dagster.runs.export import head_in, require_outside, write_in
from vt_dagster.runs.pin import not_ready, require_inputs_unchanged
from vt_dagster.runs.record_times import TableSystemTimeHistory, recorded_if
from vt_dagster.spark.settings import is_small
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, consumed_commits, require_same_log
from vt_dagster.storage.delta import place_of
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.storage.spark_reader import Snapshot
from vt_dagster.topology.feature_views import TrainingSet
from vt_dagster.topology.model import Stream, VersionedTable


class Position(BaseModel):
    """The position of a log at one of its commits."""

    log: str
    batch: int
    attempt: str = ""
    """The attempt that wrote the batch; empty in older manifests."""
    recorded_at: int
    next_offset: Offsets


class Versions(BaseModel):
    """The options of a table that decide which versions its log has at a time, see ``Shape``."""

    history_retention: int | dict[int, int] | None
    valid_until: str | None
    new_version_on: list[str] | None


class Manifest(BaseModel):
    """The inputs and the result of a training set."""

    name: str
    declared: dict[str, Any]
    pinned: dict[str, Position]
    """Positions by asset: the spine, and each table."""
    versions: dict[str, Versions] = {}
    """By table. Empty in older manifests."""
    rows: int = 0
    hash: str = ""
    """Hash of all rows and columns, regardless of order."""
    matched: list[int] = []
    """By feature view: the number of rows for which a version was found. Empty in older manifests."""

    def is_of(self, other: Manifest) -> bool:
        """Whether the other manifest has the same declaration, tables and positions."""
        mine, theirs = ((one.declared, one.versions, one.pinned) for one in (self, other))
        return mine == theirs


@dataclass
class TrainingRun:
    """Builds a training set.

    Args:
        to: the directory or URL of the Delta table, outside of the warehouse.
        spark: a session, or a function that returns one, called when it is first needed.
        tell: is called with one line per write.
    """

    declared: TrainingSet
    to: str
    warehouse: str
    spark: SparkSession | Callable[[], SparkSession]
    tell: Callable[[str], None] | None = None
    _persisted: list[DataFrame] = field(default_factory=list[DataFrame], init=False)

    def __post_init__(self) -> None:
        self.to = place_of(self.to)
        require_outside(self.declared.name, self.to, self.warehouse)

    def head(self) -> Commit | None:
        """Returns the last commit of the set, see :func:`head_in`."""
        return head_in(self.to, self.declared.name, "training_set")

    def run(self, pinned: Manifest | None = None, run_id: str | None = None) -> Commit | None:
        """Writes the set as a whole, in one Delta commit.

        Args:
            pinned: manifest whose positions to use; None = the current ones.

        Returns:
            the commit; None = the set already has these positions, decided without Spark.

        Raises:
            StorageError: another writer owns the place; a table is not ready; or a pinned position no
                longer exists, has another declaration, or gives other rows.
            ConcurrentRunError: another run of the set committed at the same time.
        """
        declared, before = self.declared, self.head()
        if pinned is not None and pinned.declared != declared.declared():
            raise StorageError(
                f"{declared.name}: expected a manifest of the current declaration, "
                f"{declared.declared()}, got one of {pinned.declared}; declare it as in the manifest"
            )
        stores = {n.name: AssetStore(self.warehouse, n, self.spark, self.tell) for n in declared.inputs}
        heads = [(store, head) for store in stores.values() if (head := store.head()) is not None]
        found = {name: self._at(store, pinned) for name, store in stores.items()}
        spine = found[declared.spine.name]
        if spine.head is None:
            return None
        if pinned is None:
            for name, at in found.items():
                if at.head is not None:
                    attempt_of = stores[name].attempt_of
                    require_same_log(declared.name, name, before, at.head.commit, attempt_of)
            self._require_ready(found)
        made = Manifest(
            name=declared.name,
            declared=declared.declared(),
            pinned={name: position_of(at) for name, at in found.items() if at.head is not None},
            versions={view.table.name: versions_of(view.table) for view in declared.features},
        )
        if before is not None and manifest_of(before).is_of(made):
            self._write_manifest(before)  # a run killed after its commit may not have written it
            return None
        store = stores[declared.spine.name]
        small = is_small(spine.total, sum(at.total for at in found.values()))
        try:
            with store.planner_settings(small):
                matched = [matched_by(i) for i in range(len(declared.features))]
                wanted = [*declared.columns, *matched]
                rows = self._persist(self._rows(stores, found).select(*map(_quoted, wanted)))
                made.rows, made.hash, made.matched = content_of(rows, matched)
                rows = rows.drop(*matched)
                if pinned is not None and (made.rows, made.hash) != (pinned.rows, pinned.hash):
                    raise StorageError(
                        f"{declared.name}: expected the {counted(pinned.rows, 'row')} with hash "
                        f"{pinned.hash} that the manifest has, got {made.rows} with {made.hash} from "
                        "the same positions: a log was changed, a table has another history_retention, "
                        "valid_until or new_version_on, or another version of the library made the "
                        "set; make the set without a manifest"
                    )
                commit = self._document(found, made, before, run_id)
                rows = parquet.packed(rows, made.rows, for_others=True)
                write_in(self.to, rows, commit, lambda: require_inputs_unchanged(declared.name, heads))
        finally:
            while self._persisted:
                store.unpersist(self._persisted.pop())
        self._write_manifest(commit)
        return commit

    def _require_ready(self, found: Mapping[str, Snapshot]) -> None:
        def last(node: Stream) -> Commit | None:
            there = found.get(node.name) or AssetStore(self.warehouse, node, self.spark).snapshot()
            return None if there.head is None else there.head.commit

        nodes = [node for node in self.declared.inputs if found[node.name].head is not None]
        if names := not_ready(nodes, last):
            raise StorageError(
                f"{self.declared.name}: expected its inputs to be ready, but {names} are not, and the "
                "set would use only a part of their records; materialize them again, or remove ready "
                "from the tables"
            )

    def _at(self, store: AssetStore, pinned: Manifest | None) -> Snapshot:
        name = store.node.name
        if pinned is None:
            return store.snapshot()
        if name not in pinned.pinned:
            return Snapshot()  # it had no records yet
        wanted = pinned.pinned[name]
        head, at = store.head(), Snapshot()
        if head is not None and head.commit.log == wanted.log:
            at = store.known_at(wanted.recorded_at)
        if at.head is None or wanted != position_of(at):
            got = "no log" if head is None else "another log"
            got = got if at.head is None else f"batch {at.head.commit.batch} of another run"
            raise StorageError(
                f"{self.declared.name}: expected the log of {name} as of batch {wanted.batch}, got "
                f"{got}: it was rebuilt, or restored from a backup, since then; make the set without a "
                "manifest"
            )
        return at

    def _persist(self, rows: DataFrame) -> DataFrame:
        self._persisted.append(rows.persist())
        self._persisted[-1].count()
        return self._persisted[-1]

    def _rows(self, stores: Mapping[str, AssetStore], found: Mapping[str, Snapshot]) -> DataFrame:
        declared = self.declared
        at = found[declared.spine.name]
        assert at.head is not None
        rows = recorded_if(True, stores[declared.spine.name].log({}, at.head))
        rows = rows.where(f"NOT {IS_TOMBSTONE}").withColumn(ARRIVAL, F.col(OFFSET))
        if declared.matured_after is not None:
            ripe = F.col(TIMESTAMP) + F.lit(declared.matured_after) <= by_partition(at.stream_time)
            rows = rows.where(ripe)
        features: list[Feature] = []
        for view in declared.features:
            table, then = stores[view.table.name], found[view.table.name]
            if then.head is None:
                raise StorageError(
                    f"{declared.name}: expected {view.table.name} to have records, got none; "
                    "materialize it first"
                )
            versions = as_read(view.table, recorded_if(True, table.view_at(then)))
            past = TableSystemTimeHistory(view.table, table, then.head, self._persist)
            features.append(Feature(view, versions, by_partition(then.stream_time), past))
        return with_features(rows, features, self._persist)

    def _document(
        self, found: Mapping[str, Snapshot], made: Manifest, before: Commit | None, run_id: str | None
    ) -> Commit:
        heads = {name: at.head for name, at in found.items() if at.head is not None}
        spine, node = heads[self.declared.spine.name], self.declared.spine
        first = Commit(asset=made.name, batch=0, attempt="", shape=shape_of(node))
        return Commit(
            asset=made.name,
            batch=1 if before is None else before.batch + 1,
            attempt=AssetStore(self.warehouse, node).new_attempt(),
            shape=shape_of(node).model_copy(update={"specification": None}),
            training_set=made.model_dump(mode="json"),
            log=spine.commit.log,
            logs={name: head.commit.log for name, head in heads.items()},
            consumed=consumed_commits({name: head.commit for name, head in heads.items()}),
            run_id=run_id,
            recorded_at=next_system_time(before or first, None),
            inputs={name: head.commit.next_offset for name, head in heads.items()},
            next_offset=spine.commit.next_offset,
            stream_time=spine.commit.stream_time,
            counts={"in": spine.commit.total, "out": made.rows},
            reads={f"{name}/log": head.version for name, head in heads.items()},
        )

    def _write_manifest(self, commit: Commit) -> None:
        path = posixpath.join(self.to, "_manifests", f"{commit.batch}.json")
        fs, local = delta.filesystem(path)
        with parquet.writing(path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(local, manifest_of(commit).model_dump_json(indent=2).encode("utf-8"))


def position_of(at: Snapshot) -> Position:
    """Returns the position of a snapshot."""
    assert at.head is not None
    commit = at.head.commit
    fields = {n: getattr(commit, n) for n in ("log", "batch", "attempt", "recorded_at", "next_offset")}
    return Position(**fields)


def versions_of(table: VersionedTable) -> Versions:
    """Returns the options of a table that decide which versions it has."""
    return Versions.model_validate(shape_of(table), from_attributes=True)


def manifest_of(commit: Commit) -> Manifest:
    """Returns the manifest of a set's commit."""
    return Manifest.model_validate(commit.training_set)


def match_rates(declared: TrainingSet, made: Manifest) -> dict[str, float]:
    """Returns by feature view the share of a set's rows for which a version was found; empty for a set
    without rows, and for one that an earlier release made."""
    if not made.rows:
        return {}
    return {label: n / made.rows for label, n in zip(declared.labels, made.matched, strict=False)}


def read_manifest(path: str) -> Manifest:
    """Returns the manifest in a file.

    Raises:
        StorageError: the file does not exist, or is no manifest.
    """
    fs, local = delta.filesystem(path)
    try:
        return Manifest.model_validate_json(fs.cat_file(local))
    except (OSError, ValidationError) as error:
        raise StorageError(
            f"expected the manifest of a training set in {path}, got {type(error).__name__}; it lies "
            "in _manifests beside the set's data"
        ) from error


def content_of(rows: DataFrame, matched: Sequence[str] = ()) -> tuple[int, str, list[int]]:
    """Returns the number of rows, a hash that is independent of their order, and for each column in
    ``matched`` the number of rows where it is true. The hash does not include these columns."""
    values = list[Column]()
    for name, kind in rows.drop(*matched).dtypes:
        value = F.col(f"`{name}`")
        values.append(as_json([name]) if "map<" in kind else value)
        values.append(value.isNull())  # the hash of a row leaves out nulls
    total = F.sum(F.xxhash64(*values).cast("decimal(38,0)"))
    found = [F.count_if(_quoted(name)) for name in matched]
    count, hashes, *sums = rows.agg(F.count(F.lit(1)), total, *found).collect()[0]
    return count, f"{int(hashes or 0) % 2**64:016x}", sums


def _quoted(column: str) -> Column:
    return F.col(f"`{column}`")
