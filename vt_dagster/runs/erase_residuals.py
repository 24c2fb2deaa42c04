"""Lists places where copies of an erased key may remain that no erase reaches, and what to do there.

The texts go into the certificate, so they contain no value of the key.
"""

from __future__ import annotations

import itertools
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from vt_dagster.columns import OLD
from vt_dagster.core.source_records import RAW, SOURCE
from vt_dagster.errors import SourceError
from vt_dagster.runs.audit import checks_of
from vt_dagster.runs.erase_plan import Places, published
from vt_dagster.sources.base import read_by_all_names
from vt_dagster.sources.consumed_files import FileInfo, Memory
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.erase_files import Key

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
    told = list[str]()
    for name in sorted(names)[:_NAMED]:
        clean = name
        for value in key.values or ():
            clean = clean.replace(value, "…") if isinstance(value, str) and value else clean
        told.append(clean if rows is None else f"{clean} ({rows[name]:,} rows)")
    left = len(names) - len(told)
    return ", ".join(told) + (f" and {left:,} more" if left else "")


# ------------------------------------------------------------------------------ Delta's statistics


def in_statistics(spark: SparkSession, path: str, key: Key, columns: Mapping[str, str]) -> int:
    """Counts the file statistics in a table's ``_delta_log``, also of earlier versions, that have the
    key as minimum or maximum.

    Args:
        columns: by key column, the table's column; empty = search the key's values in all texts.
    """
    if not columns:
        texts = [json.dumps(told, ensure_ascii=False) for told in _statistics(path)]
        words = [str(value) for value in key.values or ()]
        return sum(bool(words) and all(word in text for word in words) for text in texts)
    kinds = StructType([StructField(k, StringType()) for k in key.types])
    rows = [row for told in _statistics(path) for row in _candidates(told, key, columns)]
    if not rows:
        return 0
    typed = [F.col(f"`{k}`").cast(kind).alias(k) for k, kind in key.types.items()]
    told = spark.createDataFrame(rows, kinds).select(*typed)
    return told.where(key.condition()).count()


def _candidates(told: Mapping[str, Any], key: Key, columns: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Returns the keys that a file's statistics may stand for."""
    values = dict(zip(key.types, key.values or (), strict=False))
    sides = list[set[str]]()
    for k in key.types:
        both = [told.get(side) or {} for side in ("minValues", "maxValues")]
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
        told = list[Any]()
        if delta.COMMIT_FILE.fullmatch(name):
            actions = [json.loads(line) for line in fs.cat_file(place).decode().splitlines() if line]
            told = [(one.get("add") or one.get("remove") or {}).get("stats") for one in actions]
        elif name.endswith(".checkpoint.parquet"):
            with fs.open(place) as file:
                rows = pq.read_table(file).to_pylist()
            told = [(row.get("add") or {}).get("stats") for row in rows]
        yield from (json.loads(one) for one in told if one)
