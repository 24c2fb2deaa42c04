"""What other lengths would have cost, by many lengths at once: for a line that one can drag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

from vt_dagster.errors import StorageError
from vt_dagster.explore.warehouse_overview import GRACED
from vt_dagster.provenance.lateness import lateness
from vt_dagster.provenance.lateness_picture import share
from vt_dagster.provenance.lateness_results import Lateness
from vt_dagster.provenance.log_reader import Log
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.topology.durations import parse_length

MOST = 2_000_000
"""Logs with more records are read on the command line, where one expects to wait."""
_GRACES = ("0s", "1m", "5m", "10m", "30m", "1h", "2h", "3h", "6h", "12h", "1d", "2d", "7d")
_RETENTIONS = ("0s", "1h", "6h", "12h", "1d", "2d", "7d", "14d", "30d", "90d", "180d")
WIDTH, HEIGHT = 640, 200


@dataclass(frozen=True)
class Line:
    """One cost over the lengths, drawn on a scale of its own.

    Args:
        look: its CSS class; said: what it counts, and how many at most.
        ys: of each choice, from the top.
    """

    look: str
    said: str
    ys: Sequence[float]

    @classmethod
    def of(cls, look: str, said: str, values: Sequence[float]) -> Line:
        """A line whose highest value is at the top."""
        highest = max(*values, 1e-9)
        return cls(look, said, [round(HEIGHT * (1 - value / highest), 1) for value in values])


@dataclass(frozen=True)
class LatenessCurves:
    """The costs of some lengths, and where a drawing has them.

    Args:
        xs: of each choice.
    """

    found: Lateness
    xs: Sequence[float]
    lines: Sequence[Line]

    @property
    def chosen(self) -> int:
        """The place of the declared choice, else of the first."""
        return next((i for i, one in enumerate(self.found.choices) if one.declared), 0)

    def path(self, line: Line) -> str:
        """A line as SVG draws it."""
        return "M" + "L".join(f"{x} {y}" for x, y in zip(self.xs, line.ys, strict=True))


def lateness_curves(
    warehouse: str, name: str, more: Sequence[str], at_most: str | None
) -> LatenessCurves:
    """See ``provenance.lateness``.

    Args:
        more: lengths besides the usual ones, like ``90m``.

    Raises:
        StorageError: the logs are too large for a page, or the asset has no such length.
    """
    log = Log.open(warehouse, name)
    read = {name: log.commit.total, **{one: _total(log, one) for one in log.commit.logs}}
    if log.meaning.get("operator") not in GRACED:
        read = {name: log.commit.total}
    if sum(read.values()) > MOST:
        told = ", ".join(f"{count:,} of {one}" for one, count in read.items())
        raise StorageError(
            f"{name}: expected at most {MOST:,} records to read for a page, got {told}; run "
            f"vt-dagster lateness {name} instead"
        )
    found = _lateness(warehouse, name, log.version, tuple(more), at_most)
    step = WIDTH / max(1, len(found.choices) - 1)
    xs = [round(place * step, 1) for place in range(len(found.choices))]
    return LatenessCurves(found, xs, _lines(found))


def _lines(found: Lateness) -> list[Line]:
    shares = [one.share for one in found.choices]
    late, held = ([getattr(one, n) or 0 for one in found.choices] for n in ("late", "waiting_most"))
    refused = found.what == "history_retention"
    wrong = "records that are refused" if refused else "results that are wrong"
    told = [Line.of("wrong", f"{wrong}: up to {share(max(shares))}", shares)]
    if any(late) and not refused:
        told.append(Line.of("late", f"late records: up to {max(late):,}", late))
    if any(held):
        told.append(Line.of("waiting", f"records that wait at once: up to {max(held):,}", held))
    return told


def _total(log: Log, name: str) -> int:
    up = log.input(name)
    return 0 if up is None else up.commit.total


@lru_cache(maxsize=32)
def _lateness(
    warehouse: str, name: str, version: int, more: tuple[str, ...], at_most: str | None
) -> Lateness:
    """Kept as long as the log has that version."""
    _, head = head_of(warehouse, name)
    graced = head.shape.meaning.get("operator") in GRACED
    declared: timedelta | None = None
    if graced:
        known = lateness(name, warehouse=warehouse).declared
        declared = None if known is None else known.length
    elif isinstance(retention := head.shape.retention(), timedelta):
        declared = retention
    lengths = {parse_length(one) for one in (*(_GRACES if graced else _RETENTIONS), *more)}
    if declared is not None:
        lengths.add(declared)
    return lateness(name, grace=sorted(lengths), at_most=at_most, warehouse=warehouse)
