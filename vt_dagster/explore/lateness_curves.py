"""The cost of many lengths at once, as curves for the lateness page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Log
from vt_dagster.provenance.lateness import Lateness, lateness, share
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.topology.durations import parse_length

MOST = 2_000_000
"""Maximum number of log records to read for a page; larger logs need the command line."""
_GRACES = ("0s", "1m", "5m", "10m", "30m", "1h", "2h", "3h", "6h", "12h", "1d", "2d", "7d")
_RETENTIONS = ("0s", "1h", "6h", "12h", "1d", "2d", "7d", "14d", "30d", "90d", "180d")
WIDTH, HEIGHT = 640, 200


@dataclass(frozen=True)
class Line:
    """One cost for each length, drawn on its own scale.

    Args:
        look: the CSS class.
        said: the legend: what the line counts, and its maximum.
        ys: the position for each choice, pixels from the top.
    """

    look: str
    said: str
    ys: Sequence[float]

    @classmethod
    def of(cls, look: str, said: str, values: Sequence[float]) -> Line:
        """Returns a line that is scaled so that its maximum is at the top."""
        highest = max(*values, 1e-9)
        return cls(look, said, [round(HEIGHT * (1 - value / highest), 1) for value in values])


@dataclass(frozen=True)
class LatenessCurves:
    """The costs of several lengths, with their positions in the drawing.

    Args:
        found: the costs.
        xs: the position for each choice, pixels from the left.
        lines: one line for each kind of cost.
    """

    found: Lateness
    xs: Sequence[float]
    lines: Sequence[Line]

    @property
    def chosen(self) -> int:
        """The index of the declared choice, else 0."""
        return next((i for i, one in enumerate(self.found.choices) if one.declared), 0)

    def path(self, line: Line) -> str:
        """Returns a line as an SVG path."""
        return "M" + "L".join(f"{x} {y}" for x, y in zip(self.xs, line.ys, strict=True))


def lateness_curves(
    warehouse: str, name: str, more: Sequence[str], at_most: str | None
) -> LatenessCurves:
    """Returns the cost of the default lengths and more, see ``provenance.lateness``.

    Args:
        more: further lengths, like ``90m``.
        at_most: the maximum share of wrong results, like ``0.1%``; None = no suggestion.

    Raises:
        StorageError: the logs are too large for a page, or the asset has no such length.
    """
    log = Log.open(warehouse, name)
    read = {name: log.commit.total, **{one: _total(log, one) for one in log.commit.logs}}
    if log.specification is None or log.specification.lateness_option is None:
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
    wrong = "refused records" if refused else "wrong results"
    told = [Line.of("wrong", f"{wrong}: up to {share(max(shares))}", shares)]
    if any(late) and not refused:
        told.append(Line.of("late", f"late records: up to {max(late):,}", late))
    if any(held):
        told.append(Line.of("waiting", f"waiting records: up to {max(held):,}", held))
    return told


def _total(log: Log, name: str) -> int:
    up = log.input(name)
    return 0 if up is None else up.commit.total


@lru_cache(maxsize=32)
def _lateness(
    warehouse: str, name: str, version: int, more: tuple[str, ...], at_most: str | None
) -> Lateness:
    """Returns the costs; cached by the log's Delta version, so that a new commit is read anew."""
    _, head = head_of(warehouse, name)
    operator = head.shape.specification
    graced = operator is not None and operator.lateness_option is not None
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
