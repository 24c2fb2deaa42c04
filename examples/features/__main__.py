"""``python -m examples.features``: lands files, builds both sets, and shows where they differ."""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table

from examples.features.definitions import DATA, LANDING, SETS, defs

SCORES = {
    "2026-03-02T06:00:00Z": (
        "customer,score,at\nann,0.2,2026-03-01T00:00:00Z\nbob,0.6,2026-03-01T00:00:00Z\n"
    ),
    "2026-03-06T06:00:00Z": (
        "customer,score,at\nann,0.9,2026-03-04T00:00:00Z\nbob,0.5,2026-03-04T00:00:00Z\n"
    ),
}
VISITS = {
    "2026-03-03T23:00:00Z": "customer,bought,at\nann,false,2026-03-03T10:00:00Z\n",
    "2026-03-05T23:00:00Z": (
        "customer,bought,at\nann,true,2026-03-05T09:00:00Z\nbob,false,2026-03-05T12:00:00Z\n"
    ),
    "2026-03-07T23:00:00Z": "customer,bought,at\nbob,true,2026-03-07T15:00:00Z\n",
}
"""The content of each file, by the time at which the file was written."""


def land() -> None:
    for name, files in (("scores", SCORES), ("visits", VISITS)):
        (LANDING / name).mkdir(parents=True)
        for written, text in files.items():
            path = LANDING / name / f"{written[:10]}.csv"
            path.write_text(text, encoding="utf-8")
            seconds = datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
            os.utime(path, (seconds, seconds))


def make() -> None:
    run = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
    )
    assert run.success


def rows_of(name: str) -> list[dict[str, Any]]:
    found = pl.read_delta(str(SETS / name)).to_dicts()
    return sorted(found, key=lambda row: (row["timestamp"], row["customer"]))


def show() -> None:
    table = Table("visit", "customer", "bought", "as known then", "with the leak")
    for row, leak in zip(rows_of("examples"), rows_of("leaky"), strict=True):
        told = [f"{row['timestamp']:%d %b %H:%M}", row["customer"], str(row["bought"])]
        differs = row["score"] != leak["score"]
        table.add_row(*told, str(row["score"]), f"{leak['score']}{'  <- leak' if differs else ''}")
    Console().print(table)
    manifests = sorted(Path(SETS / "examples" / "_manifests").glob("*.json"))
    print(f"to reproduce the first set after any backfill: run with config manifest: {manifests[-1]}")


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    land()
    make()
    show()


if __name__ == "__main__":
    main()
