"""The cost of other grace periods and history retentions, as curves for the lateness page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import ceil, floor, log10

from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Log
from vt_dagster.provenance.lateness import Lateness, lateness, share
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.topology.durations import parse_length

MOST = 2_000_000
"""Maximum number of log records to read for a page; larger logs need the command line."""
_GRACES = ("0s", "1m", "5m", "10m", "30m", "1h", "2h", "3h", "6h", "12h", "1d", "2d", "7d")
_RETENTIONS = ("0s", "1h", "6h", "12h", "1d", "2d", "7d", "14d", "30d", "90d", "180d")
HEIGHT = 200
"""Height of the drawing in pixels; its width is that of the page."""
_LABELS = 15
"""Maximum number of lengths at the horizontal axis: more would overlap on a phone."""


class Axis:
    """A vertical axis from 0 to at least the largest of some values, in round steps.

    Args:
        whole: whether the values are counts.
    """

    def __init__(self, values: Iterable[float], whole: bool) -> None:
        highest, self._whole = max(values, default=0.0), whole
        step = _round_up(highest / 4) if highest else 0.25
        step = max(1.0, float(ceil(step))) if whole else step
        steps = ceil(highest / step - 1e-9) if highest else 1
        self._numbers = [step * n for n in range(steps + 1)]

    def y(self, value: float) -> float:
        """Returns the position of a value, pixels from the top."""
        return round(HEIGHT * (1 - value / self._numbers[-1]), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The numbers at the axis, from the bottom: position (pixels from the top) and text."""
        return [(self.y(n), f"{n:,.0f}" if self._whole else share(n)) for n in self._numbers]


def _round_up(number: float) -> float:
    """Returns 1, 2, 2.5 or 5 times a power of ten, at least the number."""
    unit = 10.0 ** floor(log10(number))
    return next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= number * (1 - 1e-9))


@dataclass(frozen=True)
class Line:
    """One cost for each length.

    Args:
        look: the CSS class.
        text: the legend: what the line counts, its maximum and its axis.
        ys: the position for each choice, pixels from the top.
    """

    look: str
    text: str
    ys: Sequence[float]


@dataclass(frozen=True)
class LatenessCurves:
    """The costs of several grace periods or history retentions, with their positions in the drawing.

    Args:
        found: the costs.
        xs: the position for each choice, percent from the left.
        lines: one line for each kind of cost.
        left: the axis of the share of wrong results.
        right: the axis of records; None = no line needs it.
    """

    found: Lateness
    xs: Sequence[float]
    lines: Sequence[Line]
    left: Axis
    right: Axis | None

    @property
    def declared(self) -> int | None:
        """The index of the declared choice; None = it is not known."""
        return next((i for i, one in enumerate(self.found.choices) if one.declared), None)

    @property
    def chosen(self) -> int:
        """The index of the choice that is shown first: the declared one, else the first."""
        return self.declared or 0

    @property
    def labels(self) -> list[tuple[float, timedelta]]:
        """The lengths at the horizontal axis: all of them, or every second, every third, and so on. The
        first of each pair is its position, percent from the left."""
        lengths = [one.length for one in self.found.choices]
        return [*zip(self.xs, lengths, strict=True)][:: ceil(len(self.xs) / _LABELS)]

    def path(self, line: Line) -> str:
        """Returns a line as an SVG path."""
        return "M" + "L".join(f"{x} {y}" for x, y in zip(self.xs, line.ys, strict=True))


def lateness_curves(
    warehouse: str, name: str, more: Sequence[str], at_most: str | None
) -> LatenessCurves:
    """Returns the cost of the default grace periods (or history retentions) and of more, see
    ``provenance.lateness``.

    Args:
        more: further ones, like ``90m``.
        at_most: the maximum share of wrong results, like ``0.1%``; None = no suggestion.

    Raises:
        StorageError: the logs are too large for a page, or the asset has neither a grace period nor a
            history retention.
    """
    log = Log.open(warehouse, name)
    read = {name: log.commit.total}
    if log.specification is not None and log.specification.lateness_option is not None:
        ups = {one: log.input(one) for one in log.commit.logs}
        read |= {one: 0 if up is None else up.commit.total for one, up in ups.items()}
    if sum(read.values()) > MOST:
        counts = ", ".join(f"{count:,} of {one}" for one, count in read.items())
        raise StorageError(
            f"{name}: expected at most {MOST:,} records to read for a page, got {counts}; run "
            f"vt-dagster lateness {name} instead"
        )
    found = _lateness(warehouse, name, log.version, tuple(more), at_most)
    step = 100 / max(1, len(found.choices) - 1)
    xs = [round(place * step, 2) for place in range(len(found.choices))]
    return _drawn(found, xs)


def _drawn(found: Lateness, xs: Sequence[float]) -> LatenessCurves:
    shares = [one.share for one in found.choices]
    late, held = ([getattr(one, n) or 0 for one in found.choices] for n in ("late", "waiting_most"))
    refused = found.what == "history_retention"
    counts = {"late": [] if refused else late, "waiting": held}
    counts = {look: values for look, values in counts.items() if any(values)}
    left = Axis(shares, whole=False)
    right = Axis([n for values in counts.values() for n in values], whole=True) if counts else None
    wrong = "refused records" if refused else "wrong results"
    lines = [Line("wrong", f"{wrong}: up to {share(max(shares))} (left)", [*map(left.y, shares)])]
    if right is not None:
        lines += [
            Line(look, f"{look} records: up to {max(values):,} (right)", [*map(right.y, values)])
            for look, values in counts.items()
        ]
    return LatenessCurves(found, xs, lines, left, right)


@lru_cache(maxsize=32)
def _lateness(
    warehouse: str, name: str, version: int, more: tuple[str, ...], at_most: str | None
) -> Lateness:
    """Returns the costs; cached by the log's Delta version, so that a new commit is read anew."""
    _, head = head_of(warehouse, name)
    operator = head.shape.specification
    option = None if operator is None else operator.lateness_option
    declared = head.shape.retention() if option is None else option.length
    lengths = {parse_length(one) for one in (*(_RETENTIONS if option is None else _GRACES), *more)}
    if isinstance(declared, timedelta):
        lengths.add(declared)
    return lateness(name, grace=sorted(lengths), at_most=at_most, warehouse=warehouse)
