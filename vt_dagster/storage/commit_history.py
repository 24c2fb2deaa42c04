"""The commits of a log by the time they were recorded at: what was known when. No Spark.

A log is only appended to, so what was known at a time is its rows before the offsets that the commit of
then says, with the stream time of then. Commits are found by bisection of Delta's own log. What
maintenance removes of that it has put, as it stood, into ``commits/`` beside the log before.
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
"""A file of kept commits: when the first of them was recorded, and the batch of the last."""


_NEWEST = 8
"""So many commits are looked at one by one before a batch is searched for by bisection."""


def known_at(root: str, name: str, moment: int, truncation: Truncation | None) -> Commit:
    """The last commit of an asset's log that was recorded up to a time, with what is cut off by now;
    where only a part of the one after it was, one that says how far that is.

    Args:
        root: the directory of the asset's tables.
        name: of the asset, for messages.
        moment: epoch microseconds, inclusive.
        truncation: what has been cut off from the log, as its last commit says.

    Raises:
        StorageError: nothing was recorded by then, or who knows what; or it was cut off.
    """
    found = last_that(root, lambda commit: commit["recorded_at"] <= moment)
    if truncation is not None and (found is None or found.batch < truncation.batch):
        raise StorageError(
            f"{name}: expected a time from {in_utc(truncation.recorded_at)} on, got "
            f"{in_utc(moment)} as "
            f"as_known_at: {truncation.description()}; ask for a later one"
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
    why = "an earlier maintenance has removed the commits before that"
    if first.batch == 1:
        why = "nothing was known before"
    raise StorageError(
        f"{name}: expected a time at which something was known of it, got {in_utc(moment)} as "
        f"as_known_at, but the first run that is known of was recorded at {since}: {why}; ask for a "
        "later one"
    )


def left_out_by_clock(name: str, moment: int, last: Commit) -> str | None:
    """What to say of a read with ``as_known_at`` that leaves out what was recorded by then, since the
    clock of a run was ahead; None = it does not.

    Args:
        name: of the asset.
        moment: epoch microseconds.
        last: the last commit of its log.
    """
    until = max((end for start, end in last.ahead if start <= moment < end), default=None)
    # The run whose clock was ahead does not know it; the next one notes since when it was.
    noted = bool(last.ahead) and last.ahead[-1][1] >= last.recorded_at
    to_come = last.recorded_at - time.time_ns() // 1000 > AHEAD
    if until is None and not noted and to_come and last.recorded_at > moment:
        until = last.recorded_at
    if until is None:
        return None
    return (
        f"{name}: as_known_at {in_utc(moment)} leaves out runs that had been made by then: the clock "
        f"of one was ahead, and what came after it counts as recorded up to {in_utc(until)}. For that, "
        "read without as_known_at, or ask for that time"
    )


def _with_part(root: str, found: Commit | None, moment: int) -> Commit | None:
    """A commit, with what was recorded by a time of the one after it."""
    batch = 1 if found is None else found.batch + 1
    after = last_that(root, lambda commit: commit["batch"] <= batch)
    if after is None or after.batch != batch:
        return found
    early = [step for step in after.steps if step.recorded_at <= moment]
    if not early:
        return found
    told = {n: getattr(early[-1], n) for n in ("recorded_at", "next_offset", "stream_time")}
    # What has come out of order in the part is among what has in the whole.
    update = {**told, "batch": batch - 1, "disorder": after.disorder, "steps": []}
    return (found or after).model_copy(update=update)


def last_that(root: str, early: Callable[[dict[str, Any]], bool]) -> Commit | None:
    """The last commit of an asset's log that something holds for; None = there is none that is known.

    Args:
        root: the directory of the asset's tables.
        early: what is to hold for its document: of each commit before it it does too.
    """
    path = posixpath.join(root, "log")
    try:
        found = _bisected(path, delta.versions(path), early) or _kept_that(root, early)
    except FileNotFoundError:  # a maintenance has removed it, and has it kept by now
        return last_that(root, early)
    return None if found is None else Commit.model_validate(found)


def attempt_at(root: str, batch: int) -> str | None:
    """The attempt that wrote a batch of an asset's log; None = the log has no such batch, or it is not
    known any more."""
    for place, found in enumerate(delta.commits(posixpath.join(root, "log"))):
        if found.document["batch"] <= batch:
            return found.document["attempt"] if found.document["batch"] == batch else None
        if place == _NEWEST:
            break  # far back: not commit by commit
    there = last_that(root, lambda commit: commit["batch"] <= batch)
    return there.attempt if there is not None and there.batch == batch else None


def is_of_log(root: str, then: Checkpoint, commit: Commit) -> bool:
    """Whether a view was made of the log as it is: it is not where the log was put back from a backup
    without the view, or a commit that the view has was removed.

    Args:
        then: of the view.
        commit: one of the log, perhaps not its last.
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
    """The document of our newest commit among some versions that is early enough."""

    @cache
    def ours(place: int) -> dict[str, Any] | None:
        """Of our newest commit up to a place: compactions are among them."""
        while place >= 0:
            found = delta.our_commit(path, versions[place])
            if found is not None:
                return found.document
            place -= 1
        return None

    low, high = 0, len(versions)  # those before low are early enough, those from high on too late
    while low < high:
        middle = (low + high) // 2
        found = ours(middle)
        if found is None or early(found):
            low = middle + 1
        else:
            high = middle
    return ours(low - 1)


# ------------------------------------------------------------------------- what maintenance has removed


def keep(root: str, versions: Sequence[int]) -> None:
    """Puts the documents of commits aside that are to be removed from the log.

    Args:
        root: the directory of the asset's tables.
        versions: of the log, ascending.
    """
    path = posixpath.join(root, "log")
    found = [one.document for v in versions if (one := delta.our_commit(path, v)) is not None]
    if not found:
        return
    fs, folder = delta.filesystem(posixpath.join(root, "commits"))
    name = f"{found[0]['recorded_at']:020d}-{found[-1]['batch']:010d}.json.gz"
    fs.makedirs(folder, exist_ok=True)
    # Under its name once it is whole.
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
    """The files of kept commits, by the time of their first one."""
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
    """The commits of an asset's log, oldest first, as far as they are known."""
    path, last = posixpath.join(root, "log"), 0
    kept = (document for name in _kept(root) for document in _documents(root, name))
    there = (
        one.document for v in delta.versions(path) if (one := delta.our_commit(path, v)) is not None
    )
    for documents in (kept, there):
        for document in documents:
            if document["batch"] > last:  # one may be in several files
                last = document["batch"]
                yield Commit.model_validate(document)
