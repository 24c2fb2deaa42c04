"""Replays an asset into tables beside the live ones, compares the two, and swaps them.

A replay from truncated logs, or from times before a table's history, is refused.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import as_json
from vt_dagster.errors import SourceError, StorageError, counted
from vt_dagster.runs.pin import Stores, times_of
from vt_dagster.runs.run import run_once
from vt_dagster.sources.base import Repeatable, RepeatedRun
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.storage import commit_log, delta
from vt_dagster.storage.arrow_reader import asset_names, swap_folder
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import (
    Commit,
    columns_to_compare,
    require_not_truncated,
    require_whole_stream,
)
from vt_dagster.storage.rewrite import exchange
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.node import require_name, require_path

# Retention guard


AssetStores = Callable[[Stream], AssetStore]
"""Returns the store of a stream or table."""


def require_logs(node: Stream, ups: Iterable[Stream], stores: AssetStores, keep: Commit | None) -> None:
    """Requires that no log row to read again has been truncated.

    Args:
        ups: the consumed inputs that are not recomputed themselves.
        stores, keep: see :func:`require_history`.

    Raises:
        StorageError: a log has been truncated.
    """
    start = {} if keep is None else keep.inputs
    for up in ups:
        head = stores(up).head()
        if head is not None:
            require_not_truncated(node.name, up.name, start.get(up.name, {}), head.commit)


def require_history(node: Stream, stores: AssetStores, keep: Commit | None, instead: str) -> None:
    """Requires that no record to join again is from before the table's history.

    Args:
        stores: returns the tables to read.
        keep: the last commit whose results are kept; None = all results are recomputed.
        instead: the way out, a sentence without its full stop, for the message.

    Raises:
        StorageError: the table's history does not cover some records to join again.
    """
    plan = processor_of(node).plan()
    table, up = plan.looked_up, plan.consumed[0]
    if not isinstance(table, VersionedTable):
        return
    head, last = stores(table).head(), stores(up).head()
    if head is None or last is None:
        return
    horizon = table.version_rules.horizon(head.commit.stream_time)
    start, waiting = {}, None
    if keep is not None:
        start = keep.inputs.get(up.name, {})
        waiting = processor_of(node).plan(times_of(keep)).inputs[0].rescan_from
    rows = stores(up).log(start, last, waiting)
    oldest = rows.agg(F.min(F.unix_micros(TIMESTAMP))).collect()[0][0]
    if oldest is not None and oldest < horizon:
        raise StorageError(
            f"{node.name}: expected that the history of {table.name} covers all records to join again, "
            f"got records of {up.name} from {in_utc(oldest)} on, and a history from {in_utc(horizon)} "
            f"on: they would lose their matches. {instead}: its log has all versions"
        )


def require_inputs(node: Stream, stores: AssetStores) -> None:
    """Requires tables of each input that an asset has not had before, for example under its new name:
    without them, a replay would have no rows of it.

    Args:
        stores: returns the tables of the asset and of its inputs.

    Raises:
        StorageError: such an input has never run.
    """
    head = stores(node).head()
    then = None if head is None else head.commit.shape.specification
    known = () if then is None else then.inputs
    new = [up.name for up in node.inputs if up.name not in known and stores(up).head() is None]
    if new:
        raise StorageError(
            f"{node.name}: expected commits of its new input {new[0]}, because a replay reads only "
            f"what its inputs have committed, got none; run it first (vt-dagster run {new[0]})"
        )


def require_kept(node: Stream, live: AssetStore, instead: str) -> None:
    """Requires that all files or dumps that an asset has consumed still exist.

    Args:
        instead: the other way out, for the message.

    Raises:
        SourceError: some do not exist.
    """
    if error := repeatable(node).gone(live, instead):
        raise error


# Replay


def lost_records(live: AssetStore, new: AssetStore) -> tuple[int, int] | None:
    """Returns the number of source records in a log and in its replay, if the replay lacks some; None =
    it lacks none, or only as many as were erased from the asset, or they are not counted, see
    ``Repeatable.counts_records``, or an operator makes the asset."""
    head, made = live.head(), new.head()
    if head is None or live.node.operator is not None or head.commit.shape.specification is not None:
        return None
    if not repeatable(live.node).counts_records(live):
        return None
    taken = head.commit.totals.get("in", 0)
    found = 0 if made is None else made.commit.totals.get("in", 0)
    erased = sum(head.commit.erased.values()) + sum(live.erased_rejected().values())
    return (taken, found) if found + erased < taken else None


def erased_keys_warning(live: AssetStore) -> str:
    """Returns a warning if a replay reads the source of an asset from which a key was erased; empty
    otherwise. An operator reads logs, from which the key was erased too."""
    head = live.head()
    erased = 0 if head is None or live.node.operator is not None else sum(head.commit.erased.values())
    if not erased:
        return ""
    return (
        f"! {live.node.name}: {counted(erased, 'row was', 'rows were')} erased from its log, and its "
        "source is read again: if it still has them, they come back. Erase the key again afterwards"
    )


LONGER = "Declare it under another name, or lengthen the history_retention of the table first"
"""The ways out where a replay would lose matches, see :func:`require_history`."""
Start = datetime | Mapping[str, Mapping[int, int]] | None
_RUN = "replay"


def replay(
    warehouse: str,
    node: Stream,
    into: str,
    spark: SparkSession | Callable[[], SparkSession],
    start: Start = None,
    tell: Callable[[str], None] | None = None,
    keep_recorded: bool = True,
    inputs: Mapping[str, str] | None = None,
) -> AssetStore:
    """Reprocesses an asset under another name, up to the position of the live one.

    An interrupted replay continues where it stopped. An operator's asset is made from the current logs
    of its inputs; a join with a plain table therefore finds the table's current rows.

    Args:
        into: the name of the new tables, in the same warehouse.
        start: start position of a Kafka source: a time (inclusive) or offsets ``{topic: {partition:
            offset}}``; None = where the live asset began.
        tell: is called with one line per run.
        keep_recorded: whether records of topics, files and Delta tables keep their original system
            times; they are then read in the same runs as the original. Results of an operator, and
            files whose run is unknown, are recorded now: results from the current inputs were not
            known then.
        inputs: by the names of inputs, the names of their replays, which are read instead of them.

    Returns:
        the new tables.

    Raises:
        StorageError: the asset has never run; ``into`` is not a replay of it; a log to read has been
            truncated; or the history of a looked-up table does not cover the records.
        SourceError: the source no longer has the records, or cannot start at that position.
    """
    live = AssetStore(warehouse, node, spark)
    if live.head() is None:
        raise StorageError(
            f"{node.name}: nothing was ever committed, so there is nothing to replay; run it first"
        )
    require_name(into, "a replay")
    there, whose = AssetStore(warehouse, renamed(node, into), spark).head(), replay_id(node.name)
    if there is not None and there.commit.run_id != whose:
        raise StorageError(
            f"expected {into!r} to be a new name, or a replay of {node.name!r} that was interrupted, "
            "got an asset of its own, to which a replay would add its records; choose another name"
        )
    source: Any = node.source
    if start is not None:
        if not isinstance(source, KafkaSource):
            got = "the result of an operator" if source is None else source.describe()
            raise SourceError(
                f"{node.name}: expected a Kafka source, which alone can be replayed from a position, "
                f"got {got}; remove the start (--from, --from-offsets) to reprocess everything"
            )
        source = replace(source, start=start)
    else:
        source = from_beginning(node, live).source
    copy = renamed(replace(node, source=source), into)
    live = AssetStore(warehouse, replace(node, source=source), spark)

    def stores(one: Stream) -> AssetStore:
        made = (inputs or {}).get(one.name)
        return AssetStore(warehouse, one if made is None else renamed(one, made), spark, tell)

    if copy.operator is not None:
        require_inputs(node, stores)
        require_logs(copy, processor_of(copy).plan().consumed, stores, None)
        require_history(copy, stores, None, LONGER)
    if tell is not None:
        if warning := erased_keys_warning(live):
            tell(warning)
        if missing := repeatable(live.node).gone(live, "compare the two before you swap them"):
            tell(f"! {missing}")
    repeat_runs(copy, stores, live, whose, keep_recorded)
    return AssetStore(warehouse, copy, spark)


def repeatable(node: Stream) -> Repeatable:
    """Returns the source of a node; for a result of an operator, the defaults."""
    return node.source if isinstance(node.source, Repeatable) else Repeatable()


def from_beginning(node: Stream, live: AssetStore) -> Stream:
    """Returns a node whose source starts where the live asset began.

    Raises:
        SourceError: the source no longer has all records that the live asset consumed.
    """
    if not isinstance(node.source, Repeatable):
        return node
    return replace(node, source=node.source.from_beginning(live))


def renamed(node: Stream, name: str) -> Stream:
    """Returns a stream or table under another name."""
    copy = replace(node, name=name)
    if copy.operator is not None:
        copy = replace(copy, operator=replace(copy.operator, name=name))  # pyright: ignore
    return copy


def replay_id(name: str) -> str:
    """Returns the run id of the commits of a replay.

    Args:
        name: of the replayed asset, without its key prefix.
    """
    return f"{_RUN}:{name}"


def is_replay(commit: Commit) -> bool:
    """Returns whether a commit is one of a replay."""
    return (commit.run_id or "").startswith(f"{_RUN}:")


def repeat_runs(
    copy: Stream, stores: Stores, live: AssetStore, run_id: str, keep_recorded: bool = True
) -> None:
    """Runs an asset until no new records are left, in the same runs as the live asset.

    Args:
        stores: returns the tables of the asset and of its inputs.
        live: the asset whose runs are repeated, if it has a source.
        run_id: id of the run for the commits.
        keep_recorded: see :func:`replay`.

    Raises:
        SourceError: the source no longer has the records.
    """
    head = live.head()
    source = repeatable(live.node)
    runs = [RepeatedRun()] if head is None else source.repeated_runs(live, head, keep_recorded)
    # The new log ends where the live one does: the source may have more.
    loaded = None if head is None or copy.operator is not None else head.commit.initial_load
    for run in runs:
        about: dict[str, Any] = {"run_id": run_id, "recorded_at": run.recorded_at, **run.run_config}
        if loaded is not None:
            about["initial_load"] = loaded
        while run_once(copy, stores, **about).commit is not None:
            pass


@dataclass(frozen=True)
class Differences:
    """The differences between two assets.

    Args:
        missing: number of rows that only the first has, duplicates included.
        extra: number of rows that only the second has.
        rows: these rows, with ``_count``: copies in the first minus copies in the second.
    """

    missing: int
    extra: int
    rows: DataFrame


def compare(one: AssetStore, other: AssetStore) -> Differences:
    """Compares the rows of two assets, without offsets: versions of versioned tables, current rows
    of tables, records of streams. Columns that are no longer declared are ignored.

    Plan: one shuffle of both.

    Raises:
        StorageError: the assets have different columns, or a stream's log was truncated.
    """
    what = "versions" if one.node.versioned else None
    ours, theirs = (comparable(store, what) for store in (one, other))
    if sorted(ours.columns) != sorted(theirs.columns):
        raise StorageError(
            f"expected the same columns in {one.node.name} and {other.node.name}, got "
            f"{sorted(ours.columns)} and {sorted(theirs.columns)}; choose two assets with the same "
            "columns, or run vt-dagster what-if, which compares the columns that both have"
        )
    columns = sorted(ours.columns)
    differing = differing_rows(
        *(side.select(as_json(columns, nulls=True).alias("row")) for side in (ours, theirs))
    )
    sums = differing.agg(
        F.coalesce(F.sum(F.greatest("_count", F.lit(0))), F.lit(0)),
        F.coalesce(F.sum(F.greatest(-F.col("_count"), F.lit(0))), F.lit(0)),
    ).collect()[0]
    return Differences(sums[0], sums[1], differing)


def differing_rows(ours: DataFrame, theirs: DataFrame) -> DataFrame:
    """Returns the rows whose counts differ, with ``_count``: copies in ours minus copies in theirs.

    Plan: one shuffle of both.
    """
    one, other = (rows.withColumn("_count", F.lit(n)) for rows, n in ((ours, 1), (theirs, -1)))
    counted = one.unionByName(other).groupBy(*ours.columns)
    return counted.agg(F.sum("_count").alias("_count")).where("_count != 0")


def comparable(store: AssetStore, what: str | None) -> DataFrame:
    """Returns the rows of an asset to compare: without offsets, system times, and columns that are
    no longer declared.

    Args:
        what: see ``AssetStore.read``.
    """
    rows, head = store.read(what), store.head()
    if head is not None:
        require_whole_stream(store.node.name, head.commit)
    own = columns_to_compare(rows.columns, None if head is None else head.commit)
    return rows.select(*[f"`{c}`" for c in own])


def related(warehouse: str, live: str, other: str) -> bool:
    """Returns whether one asset is a replay of the other, or both have the same definition (sources do
    not count). Also true if that is unknown, because a log is empty or damaged. Does not use Spark."""
    names = live, other
    roots = [posixpath.join(str(warehouse), name) for name in names]
    try:
        heads = [delta.last_commit(posixpath.join(root, "log")) for root in roots]
        one, two = (None if head is None else Commit.model_validate(head.document) for head in heads)
        if one is None or two is None or one.log == two.log:
            return True
        if one.shape.definition() == two.shape.definition():
            return True
        # A replay may have run on since. One that was swapped has the name of the asset it replays.
        runs = [{c.run_id for c in commit_log.commits(root)} for root in roots]
        replayed = [replay_id(posixpath.basename(name)) for name in names]
        swapped = any(run in found for run, found in zip(replayed, runs, strict=True))
        alike = (one.shape.kind, one.shape.key) == (two.shape.kind, two.shape.key)
        return replayed[0] in runs[1] or replayed[1] in runs[0] or (swapped and alike)
    except StorageError:
        return True


def swap(warehouse: str, live: str, other: str) -> None:
    """Exchanges the names of two assets. Nothing else may run meanwhile. Does not use Spark.

    To complete an interrupted swap, call again with the same arguments. Assets that consume the log of
    ``live`` refuse their next run, as its offsets now mean other records: replay and swap them too.

    Raises:
        StorageError: one of the assets does not exist, or both names are the same.
    """
    if live == other:
        raise StorageError(
            f"expected two assets to swap, got {live!r} twice; name the live asset and its replay"
        )
    fs, root = delta.filesystem(str(warehouse))
    paths = {name: posixpath.join(root, name) for name in (live, other)}
    aside = posixpath.join(root, swap_folder(live, other))
    if not fs.exists(aside):
        missing = [name for name, path in paths.items() if not fs.exists(posixpath.join(path, "log"))]
        if missing:
            raise StorageError(
                f"expected the assets {live} and {other} in {warehouse}, found no {missing}; replay an "
                f"asset into the missing name first, choose one of {asset_names(warehouse)}, or choose "
                "another warehouse with --warehouse"
            )
    for name in (live, other):
        require_path(name, "an asset")
    exchange(fs, paths[live], paths[other], aside)
    fs.mv(aside, paths[other], recursive=True)
