"""What a warehouse has, by Delta's logs and statistics alone: no data file is opened."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import StorageError, VtDagsterError
from vt_dagster.explore.lateness_unsupported import LatenessUnsupported, no_cost
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.commit_log import Checkpoint

KINDS = {"stream": "stream", "table": "table", "versioned": "versioned table"}
RUNS = 200
"""So many of the newest runs are told apart."""
GRACED = ("StreamTableJoin", "WindowedAggregate")
"""Operators with a grace period whose cost ``lateness`` tells; of versioned tables the retention's."""


@dataclass(frozen=True)
class Files:
    """What a Delta table has, as its statistics say.

    Args:
        rows: of all files.
        size: bytes.
    """

    rows: int = 0
    size: int = 0
    files: int = 0

    @classmethod
    def of(cls, path: str) -> Files:
        """Those of a table's newest version; nothing where there is none."""
        if not delta.exists(path):
            return cls()
        found = delta.files(path)
        return cls(sum(f.rows for f in found), sum(f.size for f in found), len(found))


@dataclass(frozen=True)
class Facts:
    """An asset at a glance.

    Args:
        kind: stream, table or versioned table.
        made_by: the operator; ``source`` where it has a source.
        inputs: the names of what it is made of.
        behind: records of the log that are not in the view yet; None = it has no view.
        gauges: of the last run, such as ``lateness_max`` in seconds.
        trouble: why it could not be looked at; the other fields say nothing then.
    """

    name: str
    kind: str = ""
    made_by: str = ""
    inputs: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    log: Files = field(default_factory=Files)
    view: Files = field(default_factory=Files)
    quarantine: Files = field(default_factory=Files)
    behind: int | None = None
    batch: int = 0
    recorded_at: int = 0
    stream_time: int | None = None
    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    gauges: Mapping[str, float] = field(default_factory=dict[str, float])
    no_cost: LatenessUnsupported | None = None
    trouble: str = ""

    @property
    def has_cost(self) -> bool:
        """Whether there is a page of what other lengths would have cost, or of why there is none."""
        graced = self.made_by in GRACED or self.kind == KINDS["versioned"]
        return graced or self.no_cost is not None

    @property
    def size(self) -> int:
        """Bytes of all its tables."""
        return self.log.size + self.view.size + self.quarantine.size


def overview(warehouse: str) -> list[Facts]:
    """All assets of a warehouse, by name; one that cannot be read with its trouble."""
    found: list[Facts] = []
    for name in asset_names(warehouse):
        try:
            found.append(facts(warehouse, name))
        except VtDagsterError as error:
            found.append(Facts(name, trouble=str(error)))
    return found


def require_asset(warehouse: str, name: str) -> None:
    """Nothing but an asset of the warehouse is looked at.

    Raises:
        StorageError: there is none of that name.
    """
    names = asset_names(warehouse)
    if name not in names:
        raise StorageError(f"expected one of {names} in {warehouse}, got {name!r}; choose one of them")


def facts(warehouse: str, name: str) -> Facts:
    """What is known of an asset without opening a data file."""
    _, commit = head_of(warehouse, name)
    root, meaning = posixpath.join(warehouse, name), commit.shape.meaning
    view = delta.last_of_ours(posixpath.join(root, "view"))
    behind = None
    if commit.shape.kind != "stream":
        behind = commit.total - (0 if view is None else Checkpoint.model_validate(view.document).total)
    log, of_view, quarantine = (
        Files.of(posixpath.join(root, what)) for what in ("log", "view", "quarantine")
    )
    return Facts(
        name,
        KINDS[commit.shape.kind],
        meaning.get("operator", "source"),
        tuple(_placed(warehouse, name, one) for one in commit.logs) if meaning else (),
        tuple(commit.shape.key),
        log,
        of_view,
        quarantine,
        behind,
        commit.batch,
        commit.recorded_at,
        max(commit.stream_time.values(), default=None),
        commit.totals,
        commit.gauges,
        no_cost(commit.shape),
    )


def _placed(warehouse: str, name: str, one: str) -> str:
    """An input of an asset with the folders that it is in: those of the asset, where it is there."""
    beside = posixpath.join(posixpath.dirname(name), one)
    others = [other for other in asset_names(warehouse) if posixpath.basename(other) == one]
    return beside if beside in others else (others or [one])[0]


@dataclass(frozen=True)
class Runs:
    """When the newest runs of an asset were recorded, oldest first: epoch microseconds.

    Args:
        of: how many there are in all.
    """

    times: tuple[int, ...]
    of: int


def runs(warehouse: str, name: str) -> Runs:
    """The newest runs of an asset, as far as their commits are there."""
    path = posixpath.join(warehouse, name, "log")
    _, head = head_of(warehouse, name)
    found: dict[int, int] = {}
    for one in delta.commits(path):
        document: Mapping[str, Any] = one.document
        found.setdefault(int(document["batch"]), int(document["recorded_at"]))
        if len(found) == RUNS:
            break
    return Runs(tuple(sorted(found.values())), head.batch)
