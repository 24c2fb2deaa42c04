"""Checks for logs that were truncated, or restored from a backup. No Spark.

The log's commits record the truncation (``Truncation``). For a table, its rows as of the truncation are
stored as a base, and readers fold the rest of the log into that base.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from datetime import timedelta

from vt_dagster.errors import NeedsReplayError, StorageError
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Consumed,
    Offsets,
    Truncation,
    is_of_log,
)
from vt_dagster.topology.durations import in_utc, length_at, spoken
from vt_dagster.topology.version_rules import VersionRules


def base_path(root: str, name: str) -> str:
    """Returns the directory of a table's rows as of the truncation of its log.

    Args:
        root: directory of the asset's tables.
        name: see ``Truncation.base``.
    """
    return posixpath.join(root, "bases", name)


def bases_of(root: str) -> list[str]:
    """Returns the directories of all truncation bases, unused ones included."""
    fs, folder = delta.filesystem(posixpath.join(root, "bases"))
    there: list[str] = fs.ls(folder, detail=False, refresh=True) if fs.exists(folder) else []
    return [base_path(root, posixpath.basename(path.rstrip("/"))) for path in there]


def base_of(name: str, root: str, truncation: Truncation) -> delta.Committed:
    """Returns the commit of a truncation base; its document is a ``Checkpoint``.

    Raises:
        StorageError: the base was removed.
    """
    path = base_path(root, truncation.base)
    found = delta.last_commit(path)
    if found is None:
        raise StorageError(
            f"{name}: expected its rows as of batch {truncation.batch}, where its log was truncated, "
            f"in {path}, but they were removed. Restore them from a backup, or rebuild the asset from "
            "its source (vt-dagster replay) and swap"
        )
    return found


def misses_truncated(then: Checkpoint, commit: Commit) -> bool:
    """Returns whether the view's tail includes truncated records."""
    return any(then.next_offset.get(p, 0) < commit.kept_from(p) for p in commit.next_offset)


def usable(
    root: str, then: Checkpoint, commit: Commit, rules: VersionRules | None, of_log: bool = True
) -> bool:
    """Returns whether the log's tail can be folded into a view, to answer as of a commit.

    Args:
        root: directory of the asset's tables.
        then: checkpoint of the view.
        commit: not before the checkpoint.
        rules: None = a plain table.
        of_log: whether to refuse a view that was made from another state of the log.
    """
    if misses_truncated(then, commit) or not then.suits(rules):
        return False
    return not of_log or is_of_log(root, then, commit)


def require_not_truncated(name: str, of: str, start: Offsets, commit: Commit) -> None:
    """Checks that a consumer does not start at truncated offsets: it must read every record.

    Args:
        name: the consumer, for the message.
        of: the asset whose log is consumed.
        start: first offset to consume by partition; 0 for others.
        commit: last commit of the log.

    Raises:
        StorageError: the log was truncated after ``start``.
    """
    gone = {p: end for p in commit.next_offset if start.get(p, 0) < (end := commit.kept_from(p))}
    if gone and commit.truncation is not None:
        first = ", ".join(f"{p}:{end}" for p, end in sorted(gone.items())[:3])
        places = ", ".join(f"{p}:{start.get(p, 0)}" for p in sorted(gone)[:3])
        raise StorageError(
            f"{name}: expected the log of {of} from {places} on (partition:offset), but "
            f"{commit.truncation.description()}, and begins at {first}; nothing was consumed. Rebuild "
            f"{of} from its inputs to get a whole log (vt-dagster replay {of} --into …, swap), "
            "and run maintenance with the definitions of all consumers, so that it waits for them"
        )


def consumed_commits(logs: Mapping[str, Commit]) -> dict[str, Consumed]:
    """Returns the consumed commits of logs in the form of ``Commit.consumed``."""
    return {n: Consumed(batch=one.batch, attempt=one.attempt) for n, one in logs.items()}


def require_same_log(
    name: str, of: str, before: Commit | None, commit: Commit, attempt_of: Callable[[int], str | None]
) -> None:
    """Checks that a log still contains what a consumer has consumed; every consumer calls this first.

    Args:
        name: the consumer, for the message.
        of: the asset whose log is consumed.
        before: the consumer's last commit; None = nothing consumed, no check.
        commit: last commit of the log.
        attempt_of: returns the attempt of a batch of the log; None = no longer known.

    Raises:
        StorageError: the log ends before the consumed offsets, or another run wrote the consumed batch:
            the log was restored from a backup, or a commit was removed.
    """
    if before is None or before.logs.get(of, commit.log) != commit.log:
        return  # the log was replaced under its name: the consumers handle this case themselves
    done, then = before.inputs.get(of, {}), before.consumed.get(of)
    behind = {p: end for p, end in done.items() if commit.next_offset.get(p, 0) < end}
    got = ""
    if then is not None and commit.batch < then.batch:
        got = f"its last batch is {commit.batch}"
    elif then is not None and (other := attempt_of(then.batch)) not in (None, then.attempt):
        got = f"that batch was written by another run, {other}"
    elif behind:
        partition, end = min(behind.items())
        there = commit.next_offset.get(partition, 0)
        got = f"partition {partition} ends at offset {there}, before the consumed offset {end}"
    if not got:
        return
    batch = "" if then is None else f" with batch {then.batch} of run {then.attempt}"
    raise StorageError(
        f"{name}: expected the log of {of}{batch}, which batch {before.batch} of {name} has consumed, "
        f"but {got}: the log was restored from a backup, or a commit was removed. Its offsets may now "
        f"mean other records, so nothing was consumed. Restore the lost commits of {of}; or restore "
        f"{name} and its consumers from the same backup; or rebuild {name}: an asset by vt-dagster "
        f"replay {name} --into a new name and swap, an export or a training set by removing its "
        "directory, a publication under a new name into another topic"
    )


def require_history(
    name: str,
    then: Checkpoint,
    rules: VersionRules | None,
    commit: Commit,
) -> None:
    """Checks that a truncation base has all versions that the declaration needs. The base lacks
    versions that had expired at the truncation, and was written with one ``new_version_on``.

    Args:
        then: checkpoint of the base.
        rules: the declared ones; None = a plain table, which needs no history.
        commit: the commit as of which the table is read.

    Raises:
        NeedsReplayError: the retention covers expired versions, or ``new_version_on`` has changed.
    """
    cut = commit.truncation
    if rules is None or cut is None:
        return
    new_version_on = rules.stored()["new_version_on"]
    if then.new_version_on != new_version_on:
        raise NeedsReplayError(
            f"{name}: expected new_version_on={then.new_version_on} as before, got {new_version_on}: "
            f"{cut.description()}, and its rows as of then were stored with the earlier value; declare "
            "that value, or rebuild the table from its source (vt-dagster replay) and swap"
        )
    begun, now = rules.horizons(then.stream_time), rules.horizons(commit.stream_time)
    for partition, longer in zip(then.stream_time, then.lengthened(rules), strict=False):
        since = begun[partition] + longer
        if longer > 0 and now.get(partition, since) < since:
            kept = length_at(rules.history_retention, partition)
            there = kept - timedelta(microseconds=since - now[partition])
            raise NeedsReplayError(
                f"{name}: expected a history_retention of at most {spoken(there)}, got "
                f"{spoken(kept)}: {cut.description()}, and versions that "
                f"ended before {in_utc(since)} had expired by then; lengthen it as the history grows, "
                "or rebuild the table from its source (vt-dagster replay) and swap"
            )
