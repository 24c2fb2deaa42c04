"""Commits of a log by system time, for ``as_known_at``. No Spark.

A log is append-only, so its state at a system time is the rows before the offsets of the last commit
until then, with the stream time of that commit. A binary search in Delta's log finds the commit. Before
maintenance removes commits, it copies their documents to ``commits/`` beside the log.
"""

from __future__ import annotations

import gzip
import json
import posixpath
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from uuid import uuid4

from vt_dagster.errors import ClockWarning, StorageError
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import AHEAD, Checkpoint, Commit, Truncation
from vt_dagster.topology.durations import in_utc

_KEPT = re.compile(r"(\d{20})-(\d{10})\.json\.gz")
"""A file of archived commits: system time of the first one, and batch of the last one."""


_NEWEST = 8
"""Number of newest commits that are read one by one before a binary search for a batch."""


def known_at(root: str, name: str, moment: int, truncation: Truncation | None) -> Commit:
    """Returns the last commit of an asset's log up to a system time, with the current truncation. If a
    commit has per-row system times and only some are in range, the result ends at those rows.

    Args:
        root: directory of the asset's tables.
        name: the asset, for messages.
        moment: system time, epoch microseconds, inclusive.
        truncation: truncation of the log by its last commit.

    Raises:
        StorageError: nothing was recorded by then, the commits of then were removed, or the log was
            truncated after that time.
    """
    found = last_that(root, lambda commit: commit["recorded_at"] <= moment)
    if truncation is not None and (found is None or found.batch < truncation.batch):
        raise StorageError(
            f"{name}: expected a time from {in_utc(truncation.recorded_at)} on, got "
            f"{in_utc(moment)} as "
            f"as_known_at: {truncation.description()}; use a later time"
        )
    last = delta.last_commit(posixpath.join(root, "log"))
    if last is not None and last.document.get("stepped"):
        found = _with_part(root, found, moment)
    told = None
    if last is not None:
        told = left_out_by_clock(name, moment, Commit.model_validate(last.document))
    if told is not None:
        warnings.warn(told, ClockWarning, stacklevel=2)
    if found is not None:
        return found.model_copy(update={"truncation": truncation})
    first = next(commits(root))
    since = in_utc((first.steps or [first])[0].recorded_at)
    why = "an earlier maintenance has removed the commits before it"
    if first.batch == 1:
        why = "no data existed before it"
    raise StorageError(
        f"{name}: expected as_known_at at or after the first known commit, got {in_utc(moment)}, but "
        f"that commit was recorded at {since}: {why}; use a later time"
    )


def left_out_by_clock(name: str, moment: int, last: Commit) -> str | None:
    """Returns the warning for a read with ``as_known_at`` that omits existing commits, because the
    clock of a run was ahead; None = no warning.

    Args:
        name: the asset.
        moment: system time, epoch microseconds.
        last: last commit of the log.
    """
    until = max((end for start, end in last.ahead if start <= moment < end), default=None)
    # A run cannot detect that its own clock is ahead; the next run records the interval in ``ahead``.
    noted = bool(last.ahead) and last.ahead[-1][1] >= last.recorded_at
    to_come = last.recorded_at - time.time_ns() // 1000 > AHEAD
    if until is None and not noted and to_come and last.recorded_at > moment:
        until = last.recorded_at
    if until is None:
        return None
    return (
        f"{name}: as_known_at {in_utc(moment)} omits runs that were committed by then: the clock of "
        f"one run was ahead, and later runs got system times up to {in_utc(until)}. To include them, "
        "read without as_known_at, or use that time"
    )


def _with_part(root: str, found: Commit | None, moment: int) -> Commit | None:
    """Returns a commit, extended by the rows of the next commit that were recorded by ``moment``."""
    batch = 1 if found is None else found.batch + 1
    after = last_that(root, lambda commit: commit["batch"] <= batch)
    if after is None or after.batch != batch:
        return found
    early = [step for step in after.steps if step.recorded_at <= moment]
    if not early:
        return found
    told = {n: getattr(early[-1], n) for n in ("recorded_at", "next_offset", "stream_time")}
    # The disorder of the whole commit is a safe bound for the part.
    update = {**told, "batch": batch - 1, "disorder": after.disorder, "steps": []}
    return (found or after).model_copy(update=update)


def last_that(root: str, early: Callable[[dict[str, Any]], bool]) -> Commit | None:
    """Returns the last known commit of an asset's log whose document satisfies ``early``; None = none.

    Args:
        root: directory of the asset's tables.
        early: predicate on the document; must be monotone: true for a commit implies true for all
            earlier ones.
    """
    path = posixpath.join(root, "log")
    try:
        found = _bisected(path, delta.versions(path), early) or _kept_that(root, early)
    except FileNotFoundError:  # a concurrent maintenance has archived and removed the commit: try again
        return last_that(root, early)
    return None if found is None else Commit.model_validate(found)


def attempt_at(root: str, batch: int) -> str | None:
    """Returns the attempt that wrote a batch of an asset's log; None = no such batch, or its commit is
    no longer known."""
    for place, found in enumerate(delta.commits(posixpath.join(root, "log"))):
        if found.document["batch"] <= batch:
            return found.document["attempt"] if found.document["batch"] == batch else None
        if place == _NEWEST:
            break  # too far back to read commit by commit
    there = last_that(root, lambda commit: commit["batch"] <= batch)
    return there.attempt if there is not None and there.batch == batch else None


def is_of_log(root: str, then: Checkpoint, commit: Commit) -> bool:
    """Returns whether a view was made from the current log. It was not if the log was restored from a
    backup without the view, or if a commit that the view includes was removed.

    Args:
        then: checkpoint of the view.
        commit: a commit of the log; not necessarily its last.
    """
    if then.batch == commit.batch:
        return then.log_attempt in ("", commit.attempt)
    if then.batch < commit.batch and not then.log_attempt:
        return True
    there = attempt_at(root, then.batch)
    if there is None:
        return then.batch < commit.batch
    return then.log_attempt in ("", there)


def _bisected(
    path: str, versions: Sequence[int], early: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | None:
    """Returns the document of our newest commit among ``versions`` that is early enough."""

    @cache
    def ours(place: int) -> dict[str, Any] | None:
        """Returns the document of our newest commit up to a place; skips compactions and other
        writers."""
        while place >= 0:
            found = delta.our_commit(path, versions[place])
            if found is not None:
                return found.document
            place -= 1
        return None

    low, high = 0, len(versions)  # ``early`` holds before low, and fails from high on
    while low < high:
        middle = (low + high) // 2
        found = ours(middle)
        if found is None or early(found):
            low = middle + 1
        else:
            high = middle
    return ours(low - 1)


# ------------------------------------------------------------------------------------ archived commits


def keep(root: str, versions: Sequence[int]) -> None:
    """Archives the documents of commits before they are removed from the log.

    Args:
        root: directory of the asset's tables.
        versions: Delta versions of the log, ascending.
    """
    path = posixpath.join(root, "log")
    found = [one.document for v in versions if (one := delta.our_commit(path, v)) is not None]
    if not found:
        return
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    name = f"{found[0]['recorded_at']:020d}-{found[-1]['batch']:010d}.json.gz"
    fs.makedirs(folder, exist_ok=True)
    # Renamed when complete: readers never see a partial file.
    aside = posixpath.join(folder, f".{uuid4().hex}")
    fs.pipe_file(aside, gzip.compress(json.dumps(found).encode("utf-8")))
    fs.mv(aside, posixpath.join(folder, name))


def _kept_that(root: str, early: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    for name in reversed(_kept(root)):
        documents = _documents(root, name)
        if early(documents[0]):
            return [document for document in documents if early(document)][-1]
    return None


def _kept(root: str) -> list[str]:
    """Returns the names of the archive files, ordered by the system time of their first commit."""
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    try:
        found = fs.ls(folder, detail=False, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for one in found if _KEPT.fullmatch(name := posixpath.basename(one)))


def _documents(root: str, name: str) -> list[dict[str, Any]]:
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    return json.loads(gzip.decompress(fs.cat_file(posixpath.join(folder, name))))


def commits(root: str) -> Iterator[Commit]:
    """Yields the known commits of an asset's log, oldest first."""
    path, last = posixpath.join(root, "log"), 0
    kept = (document for name in _kept(root) for document in _documents(root, name))
    there = (
        one.document for v in delta.versions(path) if (one := delta.our_commit(path, v)) is not None
    )
    for documents in (kept, there):
        for document in documents:
            if document["batch"] > last:  # a commit may be in several files
                last = document["batch"]
                yield Commit.model_validate(document)
