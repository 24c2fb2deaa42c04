"""Maintenance of an asset's tables: updates the view, compacts files, removes unused files and commits.

Safe to run beside runs of the assets. Compaction changes no rows and is not a batch; readers of the
log's last commit read the compacted files. A file is removed only after it has been out of the current
table version for ``keep``, so a run that pinned an older version can still read it.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from vt_dagster.spark.settings import is_small, settings, small_run
from vt_dagster.storage import commit_log, delta
from vt_dagster.storage.asset_store import AssetStore, asset_names
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.delta import place_of
from vt_dagster.storage.stale_reads import remove_replaced

KEEP = timedelta(days=7)
"""Default age at which files outside the current table version are removed; longer than any run."""
_LOG_FILE = re.compile(r"\.?(\d{20})\.(json|crc|checkpoint(\.\d{10}\.\d{10})?\.parquet)(\.crc)?")
_CLEANING = {
    # Else each VACUUM adds two commits to the table's log.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    # The caller decides the retention; Delta would refuse less than 7 days.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
}


def maintain(warehouse: str, name: str, spark: SparkSession, keep: timedelta = KEEP) -> dict[str, int]:
    """Updates the view of one asset to its log; compacts and cleans its tables.

    Args:
        keep: minimum age of what is removed: files outside the current table versions, commits (all
            versions younger than this remain readable), and staged data of runs that did not commit.

    Returns:
        counts: ``files_compacted``, ``attempts_removed``, ``commits_removed``; ``replaced_removed``,
        logs that were replaced (``restate``) longer than ``keep`` ago; ``conflicts``, compactions that
        lost against a concurrent writer and are repeated by the next maintenance.
    """
    root = posixpath.join(place_of(warehouse), name)
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
        files = delta.files(path)
        hours = keep / timedelta(hours=1)
        with small_run(spark, is_small(len(files), sum(file.rows for file in files))):
            try:
                done["files_compacted"] += _compact(spark, path, files)
            except PySparkException as error:
                if not delta.is_conflict(error):
                    raise
                # A run has committed meanwhile. Its data counts, and the next maintenance compacts the
                # table.
                done["conflicts"] += 1
            with settings(spark, _CLEANING):
                spark.sql(f"VACUUM {delta.quoted(path)} RETAIN {hours:g} HOURS")
        done["commits_removed"] += remove_commits(path, keep)
    done["attempts_removed"] = len(remove_attempts(root, time.time() - keep.total_seconds()))
    done["replaced_removed"] = remove_replaced(warehouse, name, keep)
    return done


def is_older(path: str, age: timedelta) -> bool:
    """Returns whether a file, or every file of a directory, was written longer than ``age`` ago."""
    return _is_before(path, time.time() - age.total_seconds())


def _is_before(path: str, until: float) -> bool:
    fs, local = delta.filesystem(path)
    with delta.listing(path):
        # Object stores have modification times for files only.
        return all(fs.modified(name).timestamp() < until for name in fs.find(local) or [local])


def remove_unused(folder: str, needed: Collection[str], until: float) -> list[int]:
    """Removes the directories in a folder that are not needed, such as those of killed processes.

    Args:
        needed: names of directories to keep.
        until: directories with a file written later are kept, epoch seconds.

    Returns:
        by removed directory, the number of its data files.
    """
    fs, local = delta.filesystem(folder)
    removed: list[int] = []
    for name in delta.names_in(folder):
        path = posixpath.join(local, name)
        if name in needed or not _is_before(posixpath.join(folder, name), until):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed by a concurrent maintenance
            removed.append(sum(one.endswith(".parquet") for one in fs.find(path)))
            fs.rm(path, recursive=True)
    return removed


def remove_attempts(root: str, until: float) -> list[int]:
    """Removes the staged data of earlier and killed runs, see :func:`remove_unused`. That of the last
    commit is kept for the next run, and that of the previous commit in case the last one is lost."""
    found = delta.last_commit(posixpath.join(root, "log"))
    last = None if found is None else Commit.model_validate(found.document)
    needed = () if last is None else (last.attempt, last.previous)
    return remove_unused(posixpath.join(root, "attempts"), needed, until)


def remove_commits(path: str, keep: timedelta) -> int:
    """Removes the commits before the newest checkpoint that is older than ``keep``. Does not use Spark.

    All versions younger than ``keep`` remain readable. Our newest commit is never removed, because the
    next run continues from its document; the clean-ups of Delta and ``deltalake`` may remove it.

    Returns:
        the number of removed commits.
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
    # Oldest first: a kill in between leaves no gap in the commits.
    gone = sorted((version, name) for version, name in files if old and version < max(old))
    if gone and posixpath.basename(path) == "log":
        # Reads with ``as_known_at`` need their documents.
        there = [int(version) for version, _ in gone]
        commit_log.keep(posixpath.dirname(path), [v for v in delta.versions(path) if v in there])
    for _, name in gone:
        with contextlib.suppress(FileNotFoundError):  # removed by a concurrent maintenance
            fs.rm_file(posixpath.join(folder, name))
    return sum(delta.COMMIT_FILE.fullmatch(name) is not None for _, name in gone)


def _compact(spark: SparkSession, path: str, files: Sequence[delta.File]) -> int:
    segments = [file.segment for file in files]
    if len(segments) == len(set(segments)):
        return 0  # OPTIMIZE merges files of one segment; to find none takes it seconds
    metrics: Any = spark.sql(f"OPTIMIZE {delta.quoted(path)}").select("metrics.numFilesRemoved").first()
    return int(metrics[0] or 0)


def maintain_all(
    warehouse: str, spark: SparkSession, keep: timedelta = KEEP
) -> dict[str, dict[str, int]]:
    """Runs :func:`maintain` for every asset of a warehouse."""
    return {name: maintain(warehouse, name, spark, keep) for name in asset_names(warehouse)}
