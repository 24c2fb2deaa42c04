"""The demo of the worked example with the flights of eight days of each month: as ``vt-dagster demo``
runs it, or with ``all`` through all assets."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg

from assets import definitions, demo, demo_all, landing
from vt_dagster.cli import main

DAYS = (*range(1, 8), 28)
"""Some of the week whose weather comes late, and days after it, whose flights are the last of a run."""
MOVED = ("N181PQ", "N197PQ")
"""They change hands in the first week of March; what they flew before is kept whole."""


def thin(days: Collection[int] = DAYS) -> None:
    """Lets the source have no other flights."""
    whole: Any = landing._flown  # pyright: ignore[reportPrivateUsage]

    def some(data: Path) -> Any:
        flights = whole(data)
        moved = flights["tailnum"].isin(MOVED) & (flights["month"] < 3)
        return flights[flights["day"].isin(list(days)) | moved]

    landing._flown = some  # pyright: ignore[reportPrivateUsage]


def unchecked_at_first() -> None:
    """Lets the first run go without checks: those of the second look at all that is there."""
    job = dg.define_asset_job("unchecked", dg.AssetSelection.all().without_checks())
    whole = dg.Definitions.merge(definitions.defs, dg.Definitions(jobs=[job]))
    first = iter(["unchecked"])
    some: Any = SimpleNamespace(resolve_job_def=lambda name: whole.resolve_job_def(next(first, name)))
    definitions.defs = some


if __name__ == "__main__":
    thin()
    unchecked_at_first()
    if sys.argv[1:] == ["all"]:
        demo_all.run(demo.LANDINGS, demo.LATE)
    else:
        sys.argv[1:] = ["demo"]
        main()
