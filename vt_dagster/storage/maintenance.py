"""Keeps tables in shape as they grow: compacts logs and history, removes files that nobody needs.

Safe beside runs of the assets. Compaction changes no rows and is not a batch; whoever reads a log's
last commit reads it compacted. Files are removed only when they have been out of every table version
for a while, so a run that pinned an older version still finds them.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import time
from datetime import timedelta
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from vt_dagster.spark.scoped_settings import settings
from vt_dagster.storage import commit_history, delta
from vt_dagster.storage.asset_store import AssetStore, asset_names
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.replaced_tables import forget_replaced
from vt_dagster.storage.shared_paths import address

KEEP = timedelta(days=7)
"""How long a file that is in no current table version is kept: longer than any run takes."""
_LOG_FILE = re.compile(r"\.?(\d{20})\.(json|crc|checkpoint(\.\d{10}\.\d{10})?\.parquet)(\.crc)?")
_CLEANING = {
    # It leaves a trace in the table's log only if asked to, two commits each time.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    # How long a file is kept is said by whoever calls.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
}


def maintain(warehouse: str, name: str, spark: SparkSession, keep: timedelta = KEEP) -> dict[str, int]:
    """Brings the view of one asset up to its log; compacts and cleans its tables.

    Args:
        keep: files that left the tables' current versions less than this ago stay, and so do the
            commits of that time (all versions since then can be read), and what runs prepared and
            did not commit.

    Returns:
        ``files_compacted``, ``attempts_removed``, ``commits_removed``; ``replaced_removed``, logs that
        others took the place of longer ago than that (``restate``); and ``conflicts``, compactions that
        another writer came before, which the next maintenance makes up for.
    """
    root = posixpath.join(address(warehouse), name)
    done = {
        "files_compacted": 0,
        "attempts_removed": 0,
        "commits_removed": 0,
        "replaced_removed": 0,
        "conflicts": 0,
    }
    if delta.exists(posixpath.join(root, "view")):
        AssetStore.open(warehouse, name, spark).catch_up(now=True)
    for table in ("log", "view", "quarantine"):
        path = posixpath.join(root, table)
        if not delta.exists(path):
            continue
        try:
            done["files_compacted"] += _compact(spark, path)
        except PySparkException as error:
            if not delta.is_conflict(error):
                raise
            done["conflicts"] += 1
        hours = keep / timedelta(hours=1)
        with settings(spark, _CLEANING):
            spark.sql(f"VACUUM {delta.quoted(path)} RETAIN {hours:g} HOURS")
        done["commits_removed"] += forget_commits(path, keep)
    done["attempts_removed"] = _forget_attempts(root, keep)
    done["replaced_removed"] = forget_replaced(warehouse, name, keep)
    return done


def is_older(path: str, age: timedelta) -> bool:
    """Whether a file, or each file of a directory, was written longer ago than that."""
    fs, local = delta.filesystem(path)
    written = [fs.modified(name) for name in fs.find(local) or [local]]  # object stores: files alone
    return all(time.time() - moment.timestamp() > age.total_seconds() for moment in written)


def forget_commits(path: str, keep: timedelta) -> int:
    """Removes the commits that led to the newest checkpoint which is older than ``keep``.

    All versions younger than that can still be read; and our newest commit, whose document is where
    the next run goes on from, stays however old it is: no clean-up of the libraries' promises that.
    Does not use Spark.

    Returns:
        how many commits.
    """
    fs, root = delta.filesystem(path)
    folder = posixpath.join(root, "_delta_log")
    names = delta.log_files(path)
    ours = delta.last_of_ours(path)
    if ours is None:
        return 0
    files = [(found[1], name) for name in names if (found := _LOG_FILE.fullmatch(name))]
    old = [
        version
        for version, name in files
        if name == f"{version}.checkpoint.parquet"
        and int(version) <= ours.version
        and is_older(posixpath.join(path, "_delta_log", name), keep)
    ]
    # The oldest first: whoever is killed here leaves commits without a gap.
    gone = sorted((version, name) for version, name in files if old and version < max(old))
    if gone and posixpath.basename(path) == "log":
        # What was known when is told by them.
        there = [int(version) for version, _ in gone]
        commit_history.keep(posixpath.dirname(path), [v for v in delta.versions(path) if v in there])
    for _, name in gone:
        with contextlib.suppress(FileNotFoundError):  # by another maintenance
            fs.rm_file(posixpath.join(folder, name))
    return sum(delta.COMMIT_FILE.fullmatch(name) is not None for _, name in gone)


def _compact(spark: SparkSession, path: str) -> int:
    metrics: Any = spark.sql(f"OPTIMIZE {delta.quoted(path)}").select("metrics.numFilesRemoved").first()
    return int(metrics[0] or 0)


def _forget_attempts(root: str, keep: timedelta) -> int:
    """What killed runs had prepared; the last commit's is what the next run goes on from, and that of
    the one before it, should the last be lost."""
    fs, attempts = delta.filesystem(posixpath.join(root, "attempts"))
    found = delta.last_commit(posixpath.join(root, "log"))
    last = None if found is None else Commit.model_validate(found[1])
    needed = () if last is None else (last.attempt, last.previous)
    removed = 0
    if not fs.exists(attempts):
        return 0
    for path in fs.ls(attempts, detail=False, refresh=True):
        name = posixpath.basename(path.rstrip("/"))
        if name not in needed and is_older(posixpath.join(root, "attempts", name), keep):
            fs.rm(path, recursive=True)
            removed += 1
    return removed


def maintain_all(
    warehouse: str, spark: SparkSession, keep: timedelta = KEEP
) -> dict[str, dict[str, int]]:
    """The same for every asset of a warehouse."""
    return {name: maintain(warehouse, name, spark, keep) for name in asset_names(warehouse)}
