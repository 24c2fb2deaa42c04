"""``python -m examples.payments``: lands two deliveries, runs all assets after each, and shows them."""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from typing import Any

import dagster as dg
import polars as pl
from rich.console import Console
from rich.table import Table

from examples.payments.definitions import DATA, LANDING, SETS, WAREHOUSE, defs
from vt_dagster import read

PAYMENT = "payment_id,customer,currency,amount,at\n"
RATE = "currency,rate,at\n"
DELIVERIES: list[dict[str, tuple[str, str]]] = [
    {
        "rates/1.csv": (
            "2026-03-28T00:05:00Z",
            RATE + "USD,0.92,2026-03-28T00:00:00Z\nGBP,1.17,2026-03-28T00:00:00Z\n",
        ),
        "customers/customers_2026-03-28.csv": (
            "2026-03-28T06:00:00Z",
            "customer,country\nann,DE\nbob,GB\n",
        ),
        "payments/1.csv": (
            "2026-03-29T10:00:00Z",
            PAYMENT
            + "p1,ann,USD,100,2026-03-28T10:00:00Z\n"
            + "p2,bob,GBP,20,2026-03-28T22:30:00Z\n"
            + "p3,ann,USD,50,2026-03-28T23:30:00Z\n"
            + "p3,ann,USD,50,2026-03-28T23:30:00Z\n"  # a duplicate
            + "p4,bob,GBP,-5,2026-03-29T09:00:00Z\n",  # an invalid amount
        ),
    },
    {
        "rates/2.csv": (  # a correction, and a tombstone
            "2026-03-30T00:05:00Z",
            RATE + "USD,0.9,2026-03-28T20:00:00Z\nGBP,,2026-03-29T00:00:00Z\n",
        ),
        "customers/customers_2026-03-30.csv": ("2026-03-30T06:00:00Z", "customer,country\nann,AT\n"),
        "payments/2.csv": (
            "2026-03-30T10:00:00Z",
            PAYMENT
            + "p2,bob,GBP,20,2026-03-28T22:30:00Z\n"  # a duplicate, in another file
            + "p5,bob,GBP,30,2026-03-29T12:00:00Z\n"
            + "p6,ann,USD,10,2026-03-29T22:30:00Z\n",
        ),
    },
]
"""Files by name, each with the time at which it was written, and its content."""


def land(delivery: dict[str, tuple[str, str]]) -> None:
    for name, (written, text) in delivery.items():
        path = LANDING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        seconds = datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
        os.utime(path, (seconds, seconds))


def make(instance: dg.DagsterInstance) -> None:
    """Runs all assets, then the sensor of the alerts, as Dagster's daemon does."""
    run = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    )
    assert run.success
    tick = dg.build_sensor_context(instance=instance, repository_def=defs.get_repository_def())
    defs.resolve_sensor_def("alerts").evaluate_tick(tick)


def show(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*["" if row[c] is None else str(row[c]) for c in columns.values()])
    Console().print(table)


def rows_of(name: str, *order: str) -> list[dict[str, Any]]:
    rows = read(name, warehouse=str(WAREHOUSE)).to_pylist()
    return sorted(rows, key=lambda row: tuple(row[c] for c in order))


def show_all() -> None:
    about = {"payment": "payment_id", "amount": "amount", "rate": "rate"}
    show("in euros", about, rows_of("in_euros", "payment_id"))
    days = [
        {**row, "day": f"{row['window_start']:%d %b %H:%M} UTC"}
        for row in rows_of("by_day", "window_start", "currency")
    ]
    show(
        "by day",
        {"day begins": "day", "currency": "currency", "payments": "payments", "amount": "amount"},
        days,
    )
    found = pl.read_delta(str(SETS / "examples")).to_dicts()
    known = sorted(found, key=lambda row: row["payment_id"])
    show("training set", {"payment": "payment_id", "rate": "rate", "country": "country"}, known)


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    home = DATA / "dagster_home"
    home.mkdir(parents=True)
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        for number, delivery in enumerate(DELIVERIES, 1):
            land(delivery)
            print(f"delivery {number}")
            make(instance)
            show_all()


if __name__ == "__main__":
    main()
