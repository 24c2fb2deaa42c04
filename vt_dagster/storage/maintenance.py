"""Keeps tables in shape as they grow: compacts logs and history, removes files that nobody needs.

Safe beside runs of the assets. Compaction changes no rows and is not a batch; whoever reads a log's
last commit reads it compacted. Files are removed only when they have been out of every table version
for a while, so a run that pinned an older version still finds them.
"""

from __future__ import annotations

import posixpath
from datetime import timedelta
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from vt_dagster.spark.settings import settings
from vt_dagster.storage import delta
from vt_dagster.storage.positions import Commit
from vt_dagster.storage.store import asset_names

KEEP = timedelta(days=7)
"""How long a file that is in no current table version is kept: longer than any run takes."""
_NO_COMMIT = {"spark.databricks.delta.vacuum.logging.enabled": "false"}
"""Cleaning leaves a trace in the table's log only if asked to, two commits each time."""


def maintain(warehouse: str, name: str, spark: SparkSession, keep: timedelta = KEEP) -> dict[str, int]:
    """Compacts and cleans the tables of one asset.

    Args:
        keep: files that left the tables' current versions less than this ago stay, and so do the
            commits of that time (all versions since then can be read), and what runs prepared and
            did not commit.

    Returns:
        ``files_compacted``, ``attempts_removed``, ``commits_removed``; and ``conflicts``,
        compactions that another writer came before, which the next maintenance makes up for.
    """
    root = posixpath.join(str(warehouse), name)
    done = {"files_compacted": 0, "attempts_removed": 0, "commits_removed": 0, "conflicts": 0}
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
        with settings(spark, _NO_COMMIT):
            spark.sql(f"VACUUM {delta.quoted(path)} RETAIN {hours:g} HOURS")
        done["commits_removed"] += delta.forget_commits(path, keep)
    done["attempts_removed"] = _forget_attempts(root, keep)
    return done


def _compact(spark: SparkSession, path: str) -> int:
    metrics: Any = spark.sql(f"OPTIMIZE {delta.quoted(path)}").select("metrics.numFilesRemoved").first()
    return int(metrics[0] or 0)


def _forget_attempts(root: str, keep: timedelta) -> int:
    """What killed runs had prepared; the last commit's is what the next run goes on from."""
    fs, attempts = delta.filesystem(posixpath.join(root, "attempts"))
    found = delta.last_commit(posixpath.join(root, "log"))
    current = None if found is None else Commit.model_validate(found[1]).attempt
    removed = 0
    if not fs.exists(attempts):
        return 0
    for path in fs.ls(attempts, detail=False, refresh=True):
        name = posixpath.basename(path.rstrip("/"))
        if name != current and delta.is_older(posixpath.join(root, "attempts", name), keep):
            fs.rm(path, recursive=True)
            removed += 1
    return removed


def maintain_all(
    warehouse: str, spark: SparkSession, keep: timedelta = KEEP
) -> dict[str, dict[str, int]]:
    """The same for every asset of a warehouse."""
    return {name: maintain(warehouse, name, spark, keep) for name in asset_names(warehouse)}
