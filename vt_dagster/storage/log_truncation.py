"""What is left of a log that was cut off or put back from a backup, and who needs more of it. No Spark.

The log's commits say what was cut off (``Truncation``). Of a table its rows as of then are put aside,
and what is read of it is the rest of the log folded onto these.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from datetime import timedelta

from vt_dagster.errors import StorageError
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import Checkpoint, Commit, Consumed, Offsets, Truncation
from vt_dagster.topology.durations import Duration, in_utc, length_at, spoken


def base_path(root: str, name: str) -> str:
    """Where a table's rows are as of where its log was cut off.

    Args:
        root: the directory of the asset's tables.
        name: see ``Truncation.base``.
    """
    return posixpath.join(root, "bases", name)


def bases_of(root: str) -> list[str]:
    """All tables that were put aside where a log was cut off, also those that are not needed now."""
    fs, folder = delta.filesystem(posixpath.join(root, "bases"))
    there: list[str] = fs.ls(folder, detail=False, refresh=True) if fs.exists(folder) else []
    return [base_path(root, posixpath.basename(path.rstrip("/"))) for path in there]


def base_of(name: str, root: str, truncation: Truncation) -> delta.Committed:
    """The commit of these rows, whose document is a ``Checkpoint``.

    Raises:
        StorageError: they are gone.
    """
    path = base_path(root, truncation.base)
    found = delta.last_commit(path)
    if found is None:
        raise StorageError(
            f"{name}: expected in {path} its rows as of batch {truncation.batch}, where its log "
            "was cut off, "
            "but somebody has removed them. Put them back, or make it anew from its source (vt-dagster "
            "replay) and swap"
        )
    return found


def misses_truncated(then: Checkpoint, commit: Commit) -> bool:
    """Whether a view needs records that were cut off from the log."""
    return any(then.next_offset.get(p, 0) < commit.kept_from(p) for p in commit.next_offset)


def require_not_truncated(name: str, of: str, start: Offsets, commit: Commit) -> None:
    """Whoever consumes a log takes every record of it: refuses to begin with one that was cut off.

    Args:
        name: who consumes, for the message; ``of``: whose log.
        start: the first offset of each partition that is asked for; of others 0.
        commit: the log's last one.

    Raises:
        StorageError: the log has not got it any more.
    """
    gone = {p: end for p in commit.next_offset if start.get(p, 0) < (end := commit.kept_from(p))}
    if gone and commit.truncation is not None:
        first = ", ".join(f"{p}:{end}" for p, end in sorted(gone.items())[:3])
        asked = ", ".join(f"{p}:{start.get(p, 0)}" for p in sorted(gone)[:3])
        raise StorageError(
            f"{name}: expected the log of {of} from {asked} on (partition:offset), but "
            f"{commit.truncation.description()}, and begins at {first}: nothing was taken. Make "
            f"{of} anew from what "
            f"it is made of (vt-dagster replay {of} --into …, swap), whose log is whole again; and "
            "give maintenance the definitions of all that consumes it, for which it waits"
        )


def consumed_commits(logs: Mapping[str, Commit]) -> dict[str, Consumed]:
    """Up to which commits logs are consumed, as ``Commit.consumed_commits`` says it."""
    return {n: Consumed(batch=one.batch, attempt=one.attempt) for n, one in logs.items()}


def require_same_log(
    name: str, of: str, before: Commit | None, commit: Commit, attempt_of: Callable[[int], str | None]
) -> None:
    """Whoever consumes a log goes on with the log that was consumed: every consumer asks this first.

    Args:
        name: who consumes, for the message; ``of``: whose log.
        before: the consumer's last commit; None = none, so anything will do.
        commit: the log's last one.
        attempt_of: gives the attempt of a batch of the log; None = it is not known any more.

    Raises:
        StorageError: the log ends before what was consumed, or its batch of that number was written by
            another run: it was put back from a backup, or a commit was removed from it.
    """
    if before is None or before.logs.get(of, commit.log) != commit.log:
        return  # another log of that name: whoever consumes says what becomes of that
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
        got = f"partition {partition} ends at offset {there}, and was consumed up to {end}"
    if not got:
        return
    batch = "" if then is None else f" with batch {then.batch} of run {then.attempt}"
    raise StorageError(
        f"{name}: expected the log of {of}{batch}, which batch {before.batch} of {name} has consumed, "
        f"but {got}: the log was put back from a backup, or a commit was removed. Its offsets may mean "
        f"other records now, so nothing was taken. Put {of} back as it was; or put {name}, and what "
        f"consumes it, back from the same backup; or make {name} anew: an asset by vt-dagster replay "
        f"{name} --into a new name and swap, an export or a training set by removing its directory, a "
        "publication under a new name into another topic"
    )


def require_history(
    name: str,
    then: Checkpoint,
    retention: Duration,
    commit: Commit,
    new_version_on: list[str] | None = None,
) -> None:
    """The rows that the kept part of a log is folded onto have what had not expired at the cut, and
    tell the versions that are declared.

    Args:
        then: of these rows.
        retention: the history retention that is declared now.
        commit: as of which the table is read.
        new_version_on: that is declared now.

    Raises:
        StorageError: the retention has been lengthened to before that, or ``new_version_on`` has
            changed.
    """
    cut = commit.truncation
    if cut is not None and then.new_version_on != new_version_on:
        raise StorageError(
            f"{name}: expected new_version_on={then.new_version_on} as before, got {new_version_on}: "
            f"{cut.description()}, and what is put aside of it tells versions by the one of then; "
            "declare it "
            "as it was, or make the table anew from its source (vt-dagster replay) and swap"
        )
    for partition, longer in zip(then.stream_time, then.lengthened(retention), strict=False):
        kept = length_at(retention, partition) // timedelta(microseconds=1)
        since = then.stream_time[partition] - kept + longer
        if longer > 0 and cut and commit.stream_time.get(partition, since + kept) - kept < since:
            there = timedelta(microseconds=commit.stream_time[partition] - since)
            raise StorageError(
                f"{name}: expected a history_retention of at most {spoken(there)}, got "
                f"{spoken(length_at(retention, partition))}: {cut.description()}, and what ended "
                "before "
                f"{in_utc(since)} had expired by then; lengthen it as the history grows, or make the "
                "table anew from its source (vt-dagster replay) and swap"
            )
