"""The demo of the worked example with the flights of eight days of each month: as ``vt-dagster demo``
runs it, or with ``all`` through all assets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from assets import demo, demo_all, landing
from vt_dagster.cli import main

DAYS = (*range(1, 8), 28)
"""Some of the week whose weather comes late, and days after it, whose flights are the last of a run."""
MOVED = ("N181PQ", "N197PQ")
"""They change hands in the first week of March; what they flew before is kept whole."""


def thin() -> None:
    """Lets the source have no other flights."""
    whole: Any = landing._flown  # pyright: ignore[reportPrivateUsage]

    def some(data: Path) -> Any:
        flights = whole(data)
        moved = flights["tailnum"].isin(MOVED) & (flights["month"] < 3)
        return flights[flights["day"].isin(DAYS) | moved]

    landing._flown = some  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    thin()
    if sys.argv[1:] == ["all"]:
        demo_all.run(demo.LANDINGS, demo.LATE)
    else:
        sys.argv[1:] = ["demo"]
        main()
