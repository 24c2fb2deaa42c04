"""Shows what another declaration of an asset would change: replays and compares it."""

from __future__ import annotations

import os
import posixpath
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import NumericType

from vt_dagster.columns import TIMESTAMP, VALID_FROM
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import as_json
from vt_dagster.errors import StorageError
from vt_dagster.runs.plan import plan, to_replay
from vt_dagster.runs.replay import (
    comparable,
    differing_rows,
    from_beginning,
    repeat_runs,
    require_history,
    require_logs,
)
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.topology.model import Stream, topological

EXAMPLES = 10
_RUN = "what-if"
_BEFORE, _AFTER = "before", "after"
_LONGER = "Declare a longer history_retention of the table, and what-if replays the table too"


@dataclass(frozen=True)
class Change:
    """A row before and after, as JSON; None = no such row."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Changes:
    """The changes that another declaration would make.

    Args:
        asset: its name.
        remade: the assets that were replayed, inputs first.
        rows_before, rows_after: number of versions, current rows, or a stream's records.
        added, removed, changed: number of rows only after, only before, and in both with other values.
            Rows are identified by key, and by time if they have one.
        keys: number of keys with such rows.
        columns_added, columns_removed: columns of one side only; they are not compared.
        sums: per numeric column, the sums before and after; None = no such column, or all null.
        examples: some of the differing rows.
    """

    asset: str
    remade: tuple[str, ...]
    rows_before: int
    rows_after: int
    added: int
    removed: int
    changed: int
    keys: int
    columns_added: tuple[str, ...] = ()
    columns_removed: tuple[str, ...] = ()
    sums: dict[str, tuple[float | None, float | None]] = field(
        default_factory=dict[str, tuple[float | None, float | None]]
    )
    examples: tuple[Change, ...] = ()

    @property
    def share(self) -> float:
        """Differing rows divided by rows before; with no rows before, 1 if any differ, else 0."""
        differ = self.added + self.removed + self.changed
        return differ / self.rows_before if self.rows_before else float(bool(differ))


def what_if(
    warehouse: str,
    node: Stream,
    spark: SparkSession,
    *,
    also: Sequence[str] = (),
    baseline: Stream | None = None,
    scratch: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Changes:
    """Returns what would change if an asset were declared as given. Writes only into a scratch place,
    which is always removed at the end; the next call removes that of a killed process.

    The asset is replayed. An input is replayed as well if its definition differs from that in the
    warehouse, and so are all inputs derived from such an input. A change of grace period does not
    change the definition: name these inputs in ``also``.

    Args:
        node: the asset with the new declaration.
        also: further direct or indirect inputs to replay.
        baseline: compare with a replay of this declaration; None = with the live table, which was made
            run by run, so that records that arrived late since differ too.
        scratch: a directory or URL; None = in the warehouse.
        tell: is called with one line per run.

    Raises:
        StorageError: the asset or an input was never committed; ``also`` names no input; the history of
            a looked-up table does not cover the records, so that joined rows would seem to change; or a
            log to read has been truncated.
        SourceError: a source to read again no longer has the records.
    """
    before = _live(warehouse, node, spark, baseline)
    with _place(scratch or warehouse) as place:
        after, remade = _replayed(warehouse, node, posixpath.join(place, _AFTER), also, spark, tell)
        if baseline is not None:
            other = posixpath.join(place, _BEFORE)
            before, _ = _replayed(warehouse, baseline, other, also, spark, tell)
        return _compared(before, after, remade)


def what_if_planned(
    warehouse: str,
    nodes: Sequence[Stream],
    spark: SparkSession,
    *,
    scratch: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Changes]:
    """Returns what planned replays (``runs.plan.replay_planned``) would change in each asset, inputs
    first; as :func:`what_if`, but each asset is replayed once, in one scratch place.

    Args:
        nodes: all streams and tables of the warehouse, with or without their inputs.

    Raises:
        StorageError: as :func:`what_if` and ``to_replay``.
        SourceError: a source to read again no longer has the records.
    """
    every = topological(nodes)
    names = {one.asset for one in to_replay(plan(warehouse, every))}
    chosen = [node for node in every if "/".join(node.path) in names]
    before = [_live(warehouse, node, spark, None) for node in chosen]
    found = list[Changes]()
    with _place(scratch or warehouse) as place:
        there = posixpath.join(place, _AFTER)
        for node, live in zip(chosen, before, strict=True):
            ups = {up.name for up in topological([node])[:-1]}
            also = [one.name for one in chosen if one.name in ups]
            found.append(_compared(live, *_replayed(warehouse, node, there, also, spark, tell)))
    return found


def _live(warehouse: str, node: Stream, spark: SparkSession, baseline: Stream | None) -> AssetStore:
    """Returns the live tables, as their last commit describes them."""
    if AssetStore(warehouse, node, spark).head() is None:
        raise StorageError(
            f"{node.name}: nothing was ever committed, so there is nothing to compare with; "
            "materialize the asset first"
        )
    before = AssetStore.open(warehouse, "/".join(node.path), spark)
    if baseline is None and not node.is_table:
        comparable(before, None)  # refuses a truncated log before the replay starts
    return before


def _replayed(
    warehouse: str,
    node: Stream,
    place: str,
    also: Sequence[str],
    spark: SparkSession,
    tell: Callable[[str], None] | None,
) -> tuple[AssetStore, tuple[str, ...]]:
    """Replays the asset in a place; returns its store, and the names of all replayed assets."""
    every = topological([node])
    unknown = sorted({*also} - {one.name for one in every})
    if unknown:
        raise StorageError(
            f"{node.name}: also must name inputs to replay, some of "
            f"{[one.name for one in every[:-1]]}, got {unknown}; correct it"
        )
    remade: list[str] = []

    def stores(one: Stream) -> AssetStore:
        return AssetStore(place if one.name in remade else warehouse, one, spark, tell)

    for one in every:
        there = AssetStore(warehouse, one, spark)
        head = there.head()
        if head is None and one.operator is None:
            raise StorageError(
                f"{one.name}: expected this input of {node.name} to have records in {warehouse}, but "
                "nothing was ever committed; materialize it first"
            )
        same = head is not None and head.commit.shape.definition() == shape_of(one).definition()
        fed = any(up.name in remade for up in one.inputs)
        if same and not fed and one.name not in also and one.name != node.name:
            continue
        remade.append(one.name)
        if one.operator is not None:
            require_logs(one, processor_of(one).plan().consumed, stores, None)
            require_history(one, stores, None, _LONGER)
        repeat_runs(from_beginning(one, there), stores, there, f"{_RUN}:{node.name}")
    return stores(node), tuple(remade)


# -------------------------------------------------------------------------------- the scratch place


@contextmanager
def _place(root: str) -> Iterator[str]:
    """Yields a directory of this process, and removes it at the end."""
    fs, folder = delta.filesystem(str(root))
    _clean(str(root))
    name = f"{_RUN}.{this_host()}.{os.getpid()}.{uuid4().hex[:8]}"
    try:
        yield posixpath.join(str(root), name)
    finally:
        if fs.exists(posixpath.join(folder, name)):
            fs.rm(posixpath.join(folder, name), recursive=True)


def _clean(root: str) -> None:
    """Removes scratch directories of dead processes of this machine."""
    fs, folder = delta.filesystem(root)
    for name in delta.names_in(root):
        what, *about = name.split(".")
        if what != _RUN or len(about) != 3 or about[0] != this_host() or _is_running(about[1]):
            continue
        fs.rm(posixpath.join(folder, name), recursive=True)


def this_host() -> str:
    """Returns this machine's name, usable as a directory name."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        return True
    return True


# ------------------------------------------------------------------------------------ the comparison


def _compared(before: AssetStore, after: AssetStore, remade: tuple[str, ...]) -> Changes:
    """Compares two assets. Plan: two shuffles of both; for differing rows a window and a join."""
    now = {then: name for name, some in after.node.earlier.items() for then in some}
    if [now.get(k, k) for k in before.node.key] != [*after.node.key]:
        raise StorageError(
            f"{after.node.name}: expected the key {list(before.node.key)} of the live table, which "
            f"identifies the rows to compare, got {list(after.node.key)}; replay it under another "
            "name, and compare"
        )
    sides = [comparable(one, "versions" if one.node.versioned else None) for one in (before, after)]
    sides[0] = sides[0].withColumnsRenamed(now)
    names = [one.columns for one in sides]
    common = [c for c in names[0] if c in names[1]]
    key = [c for c in after.node.key if c in common]
    timed = [c for c in (VALID_FROM,) if c in common]
    if not after.node.is_table:
        timed = [TIMESTAMP]
    identity = [*key, *timed]
    shown = sorted(c for c in common if c not in identity) or identity
    texts = {"key": key, "id": identity, "row": shown}
    both = [
        one.select(*[as_json(of, nulls=True).alias(name) for name, of in texts.items()])
        for one in sides
    ]
    differing = differing_rows(*both).persist()
    try:
        pairs = _paired(differing)
        old, new = F.col(_BEFORE).isNotNull(), F.col(_AFTER).isNotNull()
        counts = pairs.agg(
            F.count_if(~old & new).alias("added"),
            F.count_if(old & ~new).alias("removed"),
            F.count_if(old & new).alias("changed"),
            F.count_distinct("key").alias("keys"),
        ).collect()[0]
        some = pairs.orderBy("id", "n").limit(EXAMPLES).collect()
    finally:
        differing.unpersist()
    totals = [_totals(rows) for rows in sides]
    numbers = [c for c in dict.fromkeys([*totals[0], *totals[1]]) if c != _ROWS]
    return Changes(
        after.node.name,
        remade,
        int(totals[0][_ROWS] or 0),
        int(totals[1][_ROWS] or 0),
        **counts.asDict(),
        columns_added=tuple(c for c in names[1] if c not in names[0]),
        columns_removed=tuple(c for c in names[0] if c not in names[1]),
        sums={c: (totals[0].get(c), totals[1].get(c)) for c in numbers},
        examples=tuple(Change(r["key"], r[_BEFORE], r[_AFTER]) for r in some),
    )


_ROWS = "_rows"


def _paired(differing: DataFrame) -> DataFrame:
    """Pairs rows before and after by identity: ``key, id, n, before, after``."""
    one_each = differing.withColumn(
        "_", F.explode(F.sequence(F.lit(1).cast("long"), F.abs("_count")))
    ).drop("_")
    in_order = W.partitionBy("id", F.col("_count") > 0).orderBy("row")
    rows = one_each.withColumn("n", F.row_number().over(in_order))
    old, new = F.when(F.col("_count") > 0, F.col("row")), F.when(F.col("_count") < 0, F.col("row"))
    return rows.groupBy("id", "n").agg(
        F.first("key").alias("key"), F.max(old).alias(_BEFORE), F.max(new).alias(_AFTER)
    )


def _totals(rows: DataFrame) -> dict[str, float | None]:
    """Returns the number of rows, and the sums of numeric columns."""
    numeric = [f.name for f in rows.schema.fields if isinstance(f.dataType, NumericType)]
    sums = [F.sum(F.col(f"`{c}`").cast("double")).alias(c) for c in numeric]
    return rows.agg(F.count(F.lit(1)).cast("double").alias(_ROWS), *sums).collect()[0].asDict()
