"""The initial snapshot of a table, before its changes."""

from __future__ import annotations

import posixpath

from vt_dagster.errors import SourceError
from vt_dagster.sources.base import Whole
from vt_dagster.sources.delta_source import DeltaSource
from vt_dagster.sources.pinned_versions import PinnedState
from vt_dagster.sources.snapshot_source import SnapshotSource


def pin_start(source: SnapshotSource | DeltaSource) -> Whole | None:
    """Pins the initial snapshot; returns None if there is none yet. Does not use Spark.

    Raises:
        SourceError: there are several, or the directory or table does not exist.
    """
    if isinstance(source, DeltaSource):
        version = source.start if isinstance(source.start, int) else None
        found = source.pin(None, version)
        return found if isinstance(found, PinnedState) else None
    pinned = source.pin(None)
    if pinned.waiting:
        there = [d.name for d in source.dumps()]
        where = posixpath.join(str(source.path), source.pattern)
        raise SourceError(
            f"expected one dump to start with in {where}, found {len(there)}: "
            f"{', '.join(there[:3])}{' …' if len(there) > 3 else ''}; nothing was committed. Name one "
            "by the pattern of start, or move the others away"
        )
    return None if pinned.empty else pinned
