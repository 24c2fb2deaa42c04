"""Runs both demos of the worked example, ``vt-dagster demo`` and all assets, one after the other in a
process, with the flights of eight days of each month. ``python -m tests.demo_subset DIRECTORY``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from filelock import FileLock

from vt_dagster.cli import main

DAYS = (*range(1, 8), 28)
"""Days of the week whose weather comes late, and a later day, whose flights are the last of a run."""
MOVED = ("N181PQ", "N197PQ")
"""Aircraft that change their airline in the first week of March; all their earlier flights are kept."""
SHORT, ALL = "short", "all"
COLUMNS = "120"
EXPLORE = "http://127.0.0.1:3001"
"""The address in the assets' links; no server answers there."""
NEXT = "\n--- all assets ---\n"


def demo_results(which: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory with the results of a demo, and the demo's output. Both demos run once for all of
    pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo_subset"
    printed = root / "printed"
    with FileLock(f"{root}.lock"):
        if not printed.exists():
            root.mkdir()
            run = subprocess.run(
                [sys.executable, "-m", "tests.demo_subset", str(root)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "COLUMNS": COLUMNS, "VT_DAGSTER_EXPLORE": EXPLORE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1500,
            )
            assert run.returncode == 0, run.stdout
            printed.write_text(run.stdout)
    short, _, every = printed.read_text().partition(NEXT)
    return root / which, short if which == SHORT else every


def limit_to_days() -> None:
    """Restricts the source to the flights of ``DAYS`` and the early flights of ``MOVED``."""
    from assets import landing

    whole: Any = landing._flown  # pyright: ignore[reportPrivateUsage]

    def some(data: Path) -> Any:
        flights = whole(data)
        moved = flights["tailnum"].isin(MOVED) & (flights["month"] < 3)
        return flights[flights["day"].isin(DAYS) | moved]

    landing._flown = some  # pyright: ignore[reportPrivateUsage]


def skip_checks(runs: int) -> None:
    """Makes the first ``runs`` runs go without checks."""
    from assets import definitions

    job = dg.define_asset_job("unchecked", dg.AssetSelection.all().without_checks())
    whole = dg.Definitions.merge(definitions.defs, dg.Definitions(jobs=[job]))
    first = iter(["unchecked"] * runs)
    some: Any = SimpleNamespace(resolve_job_def=lambda name: whole.resolve_job_def(next(first, name)))
    definitions.defs = some


def reimport_example(data: Path, without_checks: int) -> None:
    """Imports the example again, for another directory; the Spark session stays."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("assets", "resources")]:
        del sys.modules[name]
    os.environ["VT_DAGSTER_DATA"] = str(data)
    limit_to_days()
    skip_checks(without_checks)


def run_both_demos(root: Path) -> None:
    """Runs both demos, each in its own directory. Of the short demo only the second run has checks,
    which cover the rows of both runs."""
    reimport_example(root / SHORT, without_checks=1)
    sys.argv[1:] = ["demo"]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    print(NEXT, end="", flush=True)
    reimport_example(root / ALL, without_checks=2)
    from assets import demo, demo_all

    demo_all.run(demo.LANDINGS, demo.LATE)


if __name__ == "__main__":
    run_both_demos(Path(sys.argv[1]))
