"""Measurement: contenders run alternately, medians are compared, each contender has its own output."""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Result:
    """One line of ``results.json``. ``ratio`` is ours ÷ peer, of medians in seconds."""

    name: str
    rows: int
    seconds: float
    peer: str
    peer_seconds: float
    ratio: float
    target: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Times = dict[str, list[float]]
"""By contender, the seconds of each repetition."""


def take_turns(
    contenders: Mapping[str, Callable[[], dict[str, float] | None]], repeat: int, warm: int = 1
) -> Times:
    """Times contenders alternately, A B A B …, after some rounds that do not count.

    If only one round counts, there is none before it.

    A contender may return the times of its parts; these are kept as ``contender: part``.
    """
    times: Times = {}
    for turn in range(1 - warm if repeat > 1 else 1, repeat + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            parts = run() or {}
            taken = {name: time.perf_counter() - start}
            taken.update({f"{name}: {part}": seconds for part, seconds in parts.items()})
            if turn > 0:
                for label, seconds in taken.items():
                    times.setdefault(label, []).append(seconds)
    return times


def compare(
    name: str, rows: int, ours: list[float], peer: str, theirs: list[float], target: float | None
) -> Result:
    """The result of a benchmark from the times of both contenders."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    return Result(name, rows, round(mine, 3), peer, round(other, 3), round(mine / other, 2), target)


class Outputs:
    """A directory for the output of each contender, emptied each time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> str:
        """The path to which a contender writes."""
        return str(self.root / name)

    def fresh(self, name: str) -> str:
        """The path of a contender, emptied."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        self.root.mkdir(parents=True, exist_ok=True)
        return self.path(name)


OPERATORS = {
    "scans": "FileScan",
    "shuffles": "Exchange hashpartitioning",
    "sorts": "Sort [",
    "windows": "Window [",
    "broadcasts": "BroadcastExchange",
    "Python": "Python",
}


def plan_of(rows: DataFrame) -> str:
    """The counts of operators in Spark's plan: ``2 scans, 1 shuffles, …``."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        rows.explain()
    counts = {name: text.getvalue().count(sign) for name, sign in OPERATORS.items()}
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)
