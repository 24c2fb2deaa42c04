"""``python -m examples.sql``: lands two deliveries, runs all assets after each, and shows models."""

from __future__ import annotations

import shutil
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table

from examples.sql.definitions import DATA, LANDING, RESULTS, defs, models

PRICE, ORDER = "product,price,at\n", "order_id,product,quantity,at\n"
DELIVERIES = [
    {
        "prices/1.csv": PRICE + "apple,1.0,2026-03-01T00:00:00Z\npear,2.0,2026-03-01T00:00:00Z\n",
        "orders/1.csv": (
            ORDER
            + "o1,apple,3,2026-03-02T08:00:00Z\n"
            + "o2,apple,2,2026-03-02T10:00:00Z\n"
            + "o3,pear,1,2026-03-02T11:00:00Z\n"
        ),
    },
    {
        "prices/2.csv": (  # a late price, and a tombstone
            PRICE + "apple,1.5,2026-03-02T09:00:00Z\npear,,2026-03-03T00:00:00Z\n"
        ),
        "orders/2.csv": ORDER + "o4,pear,4,2026-03-03T12:00:00Z\n",
    },
]
"""Files by name."""


def land(delivery: dict[str, str]) -> None:
    for name, text in delivery.items():
        path = LANDING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def make() -> None:
    run = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    )
    assert run.success


def rows_of(model: str) -> list[dict[str, Any]]:
    return pl.read_parquet(RESULTS / f"{model}.parquet").to_dicts()


def show_all() -> None:
    for model in (made.key.path[-1] for made in models):
        rows = rows_of(model)
        table = Table(*(rows[0] if rows else ["no row"]))
        for row in rows:
            shown = {c: f"{v:%d %b %H:%M}" if c == "valid_from" else v for c, v in row.items()}
            table.add_row(*["" if v is None else str(v) for v in shown.values()])
        print(model)  # a title would be wrapped to the width of its table
        Console().print(table)


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    for number, delivery in enumerate(DELIVERIES, 1):
        land(delivery)
        print(f"delivery {number}")
        make()
        show_all()


if __name__ == "__main__":
    main()
