"""What other lengths would have cost, by many lengths at once: for a line that one can drag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

from vt_dagster.errors import StorageError
from vt_dagster.provenance.choices import Choice, Lateness
from vt_dagster.provenance.lateness import lateness
from vt_dagster.provenance.logs import Log
from vt_dagster.storage.lookup import head_of
from vt_dagster.topology.durations import parse_length

MOST = 5_000_000
"""Logs with more records are read on the command line, where one expects to wait."""
_GRACES = ("0s", "1m", "5m", "10m", "30m", "1h", "2h", "3h", "6h", "12h", "1d", "2d", "7d")
_RETENTIONS = ("0s", "1h", "6h", "12h", "1d", "2d", "7d", "14d", "30d", "90d", "180d")
WIDTH, HEIGHT = 640, 200


@dataclass(frozen=True)
class Costs:
    """The costs of some lengths, with the places of their points in a drawing.

    Args:
        highest: the largest share of wrong results that is drawn.
        xs: of each choice; wrong, waiting: the heights of its points, from the top.
    """

    found: Lateness
    highest: float
    xs: Sequence[float]
    wrong: Sequence[float]
    waiting: Sequence[float]

    @property
    def chosen(self) -> int:
        """The place of the declared choice, else of the first."""
        return next((i for i, one in enumerate(self.found.choices) if one.declared), 0)

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The lines as SVG draws them, each with its CSS class."""
        told = [("wrong", self.wrong)]
        if any(one.waiting_most for one in self.found.choices):
            told.append(("waiting", self.waiting))
        return [
            (look, "M" + "L".join(f"{x} {y}" for x, y in zip(self.xs, ys, strict=True)))
            for look, ys in told
        ]


def costs(warehouse: str, name: str, more: Sequence[str], at_most: str | None) -> Costs:
    """See ``provenance.lateness``.

    Args:
        more: lengths besides the usual ones, like ``90m``.

    Raises:
        StorageError: the logs are too large for a page, or the asset has no such length.
    """
    log = Log.open(warehouse, name)
    read = {name: log.commit.total, **{one: _total(log, one) for one in log.commit.logs}}
    if log.meaning and sum(read.values()) > MOST:
        _refuse(name, read)
    if not log.meaning and read[name] > MOST:
        _refuse(name, read)
    found = _lateness(warehouse, name, log.version, tuple(more), at_most)
    highest = max([one.share for one in found.choices] + [1e-9])
    held = max([one.waiting_most or 0 for one in found.choices] + [1])
    step = WIDTH / max(1, len(found.choices) - 1)
    return Costs(
        found,
        highest,
        [round(place * step, 1) for place in range(len(found.choices))],
        [_height(one.share / highest) for one in found.choices],
        [_height((one.waiting_most or 0) / held) for one in found.choices],
    )


def _height(share: float) -> float:
    return round(HEIGHT * (1 - share), 1)


def _total(log: Log, name: str) -> int:
    up = log.input(name)
    return 0 if up is None else up.commit.total


def _refuse(name: str, read: dict[str, int]) -> None:
    told = ", ".join(f"{count:,} of {one}" for one, count in read.items())
    raise StorageError(
        f"{name}: expected at most {MOST:,} records to read for a page, got {told}; run "
        f"vt-dagster lateness {name} instead"
    )


@lru_cache(maxsize=32)
def _lateness(
    warehouse: str, name: str, version: int, more: tuple[str, ...], at_most: str | None
) -> Lateness:
    """Kept as long as the log has that version."""
    _, head = head_of(warehouse, name)
    joined = bool(head.shape.meaning)
    declared: Choice | None = None
    if joined:
        declared = lateness(name, grace=(), warehouse=warehouse).declared
    else:
        retention = head.shape.retention()
        if isinstance(retention, timedelta):
            declared = Choice(retention, 0, 0, 0)
    lengths = {parse_length(one) for one in (*(_GRACES if joined else _RETENTIONS), *more)}
    if declared is not None:
        lengths.add(declared.length)
    return lateness(name, grace=sorted(lengths), at_most=at_most, warehouse=warehouse)
