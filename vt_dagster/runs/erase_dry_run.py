"""Dry run of an erase: reports what an erase would remove now, and writes nothing.

The dry run searches the same tables in the same way as an erase, so both report the same rows unless
something runs in between. An erase first brings a view up to its log. For a view behind its log, the
dry run therefore counts the rows that readers see, without expired rows that its files may still have;
the number of files is unknown. Rejected records of a killed run are found only after another run has
moved them into the quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.core.log_columns import log_schema
from vt_dagster.runs.erase_certificate import Certificate, Searched
from vt_dagster.runs.erase_plan import KEPT, KEPT_EXPORT, Places
from vt_dagster.storage import delta, erase_files, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.erase_files import Found, Key
from vt_dagster.storage.log_truncation import bases_of
from vt_dagster.storage.spark_reader import Head
from vt_dagster.storage.view import stored_as
from vt_dagster.topology.model import Table

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

    def note(table: str, told: Searched) -> None:
        done.add(table, told)
        say(f"{table}: {told}")

    for one in plan:
        store = AssetStore(warehouse, one.node, spark, None)
        head = store.head()
        if not one.columns:
            done.kept[one.name] = KEPT
        elif head is not None:
            for table, told in _asset(store, head, one, key, of_source=one is plan[0]):
                note(f"{one.name}/{table}", told)
            rows = parquet.read(spark, store.log_path, head.version, like=log_schema(one.node))
            left[one.name] = erase_files.without(rows, one.marked(key), one.way_of_log, one.values)
    for path, one in exports.items():
        if not one.in_export(path):
            done.kept[path] = KEPT_EXPORT
            continue
        there = delta.last_commit(path)
        assert there is not None
        note(path, _told(erase_files.find(spark, path, there.version, one.marked(key))))
    for name, why in done.kept.items():
        say(f"! {name}: {why}")
    return left


def _asset(
    store: AssetStore, head: Head, one: Places, key: Key, of_source: bool
) -> Iterator[tuple[str, Searched]]:
    """Yields the results of one asset, by table."""
    spark, marked = store.spark, one.marked(key)
    log = erase_files.find(spark, store.log_path, head.version, marked, log_schema(one.node))
    yield "log", _told(log)
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
            yield "view" if path == store.view_path else "base", _told(found)
    rejected = delta.last_commit(store.quarantine_path) if of_source else None
    if rejected is not None and one.node.operator is None and key.values:
        found = erase_files.find(spark, store.quarantine_path, rejected.version, key.in_text)
        yield "quarantine", _told(found)


def _told(found: Found) -> Searched:
    return Searched(found.searched, found.rows, found.old, files=len(found.places))
