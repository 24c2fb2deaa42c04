"""Lists the assets of a warehouse from Delta's logs and statistics; opens no data file.

For some assets the cost of other lengths cannot be computed: the reason, and the alternative.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import StorageError, VtDagsterError
from vt_dagster.provenance.explain_request import SOURCE, inputs_named
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.commit_log import Checkpoint, Shape
from vt_dagster.topology.specification import LatenessUnsupported

_COUNTS = {
    "late": "late records",
    "late_records_dropped": "records whose windows had closed",
    "expired_window_records_dropped": "updates of windows that had closed",
    "corrected": "rows that were corrected",
    "corrections_too_late": "rows whose correction came too late: they are in quarantine",
}
_LATE = ("late", "late_records_dropped")

_BY_SOURCE = LatenessUnsupported(
    "It follows the order of its source and accepts each record, however old its timestamp is. So no "
    "record is late for any history retention.",
    (),
)


def no_cost(shape: Shape) -> LatenessUnsupported | None:
    """Returns why the cost of other lengths cannot be computed; None = ``lateness`` computes it, or the
    asset has no such length."""
    if shape.ordered_by_source:
        return _BY_SOURCE
    return None if shape.specification is None else shape.specification.lateness_unsupported


def came_late(totals: Mapping[str, int]) -> dict[str, int]:
    """Returns an asset's counts of late records, by description."""
    return {label: totals[name] for name, label in _COUNTS.items() if name in totals}


# Warehouse overview


KINDS = {"stream": "stream", "table": "table", "versioned": "versioned table"}
RUNS = 200
"""Maximum number of runs listed, the newest."""


@dataclass(frozen=True)
class Files:
    """The size of a Delta table, from its statistics.

    Args:
        rows: the number of rows in all files.
        size: bytes.
        files: the number of files.
    """

    rows: int = 0
    size: int = 0
    files: int = 0

    @classmethod
    def of(cls, path: str) -> Files:
        """Returns the size of a table's newest version; zeros if there is no table."""
        if not delta.exists(path):
            return cls()
        found = delta.files(path)
        return cls(sum(f.rows for f in found), sum(f.size for f in found), len(found))


@dataclass(frozen=True)
class Facts:
    """The facts about an asset that the overview shows.

    Args:
        kind: stream, table or versioned table.
        made_by: the operator; ``source`` for an asset with a source.
        waits: whether the operator waits for late records.
        inputs: the names of its inputs.
        behind: the number of log records that are not in the view yet; None = it has no view.
        gauges: measures of the last run, such as ``lateness_max`` in seconds.
        trouble: the error if the asset could not be read; the other fields are empty then.
    """

    name: str
    kind: str = ""
    made_by: str = ""
    waits: bool = False
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
        """Whether there is a lateness page: with the cost of other lengths, or why it is not known."""
        return self.waits or self.kind == KINDS["versioned"] or self.no_cost is not None

    @property
    def late(self) -> int:
        """The number of late records of all runs, also those whose windows had closed."""
        return sum(self.totals.get(name, 0) for name in _LATE)

    @property
    def size(self) -> int:
        """The size of the asset's log, view and quarantine, in bytes."""
        return self.log.size + self.view.size + self.quarantine.size


def overview(warehouse: str) -> list[Facts]:
    """Returns all assets of a warehouse, by name; an asset that cannot be read has ``trouble``."""
    found: list[Facts] = []
    for name in asset_names(warehouse):
        try:
            found.append(facts(warehouse, name))
        except VtDagsterError as error:
            found.append(Facts(name, trouble=str(error)))
    return found


def require_asset(warehouse: str, name: str) -> None:
    """Checks that a name is an asset of the warehouse.

    Raises:
        StorageError: there is no such asset.
    """
    names = asset_names(warehouse)
    if not names:
        raise StorageError(f"expected an asset {name!r} in {warehouse}, which has none; run it first")
    if name not in names:
        raise StorageError(f"expected one of {names} in {warehouse}, got {name!r}; choose one of them")


def facts(warehouse: str, name: str) -> Facts:
    """Returns the facts about an asset; opens no data file."""
    _, commit = head_of(warehouse, name)
    root, operator = posixpath.join(warehouse, name), commit.shape.specification
    view = delta.last_of_ours(posixpath.join(root, "view"))
    behind = None
    if commit.shape.kind != "stream":
        behind = commit.total - (0 if view is None else Checkpoint.model_validate(view.document).total)
    log, of_view, quarantine = (
        Files.of(posixpath.join(root, what)) for what in ("log", "view", "quarantine")
    )
    inputs = () if operator is None else commit.logs
    return Facts(
        name,
        KINDS[commit.shape.kind],
        SOURCE if operator is None else operator.operator,
        operator is not None and operator.lateness_option is not None,
        tuple(next(iter(inputs_named(warehouse, name, one)), one) for one in inputs),
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


@dataclass(frozen=True)
class Runs:
    """The system times of an asset's newest runs, oldest first, epoch microseconds.

    Args:
        times: of the newest runs.
        of: the number of all runs, of which these are the newest.
    """

    times: tuple[int, ...]
    of: int


def runs(warehouse: str, name: str) -> Runs:
    """Returns the newest runs of an asset whose commits still exist."""
    path = posixpath.join(warehouse, name, "log")
    _, head = head_of(warehouse, name)
    found: dict[int, int] = {}
    for one in delta.commits(path):
        document: Mapping[str, Any] = one.document
        found.setdefault(int(document["batch"]), int(document["recorded_at"]))
        if len(found) == RUNS:
            break
    return Runs(tuple(sorted(found.values())), head.batch)
