"""The deliveries of other systems: each day a full dump of customers and a file of orders, and the
shop's prices and exchange rates. The day determines every number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl

FIRST, DAYS = date(2026, 3, 2), 7
TIERS = ("bronze", "silver", "gold")
PRODUCTS = ("apple", "bread", "cheese")
CURRENCIES = ("CHF", "USD")
CUSTOMERS = 12


def number(day: date) -> int:
    """The number of a day: 0, 1, … in the week."""
    return (day - FIRST).days


def customers(day: date) -> pl.DataFrame:
    """All customers at the end of a day: some have another tier, some have left, one is new."""
    n = number(day)
    there = [c for c in range(CUSTOMERS + n) if not (c < n and c % 3 == 0)]
    tiers = [TIERS[min(2, (c + n) // 6 % 3)] for c in there]
    return pl.DataFrame({"customer": [f"c{c:02d}" for c in there], "tier": tiers})


def prices(day: date) -> list[tuple[str, float, datetime]]:
    """Prices that begin on a day: one product's at midnight, another's at ten o'clock."""
    n, start = number(day), datetime(day.year, day.month, day.day, tzinfo=timezone.utc)
    first, second = PRODUCTS[n % 3], PRODUCTS[(n + 1) % 3]
    return [(first, 1.0 + n, start), (second, 2.5 + n, start + timedelta(hours=10))]


def rates(day: date) -> pl.DataFrame:
    """Exchange rates that are valid from the begin of a day on."""
    n, start = number(day), datetime(day.year, day.month, day.day, tzinfo=timezone.utc)
    rows = {"currency": CURRENCIES, "rate": [1.0 + n / 10, 0.9 - n / 100], "at": [start, start]}
    return pl.DataFrame(rows)


def orders(day: date) -> Iterator[dict[str, Any]]:
    """The orders in a day's file, one per hour; a day's last three orders come with the next file."""
    for hour in range(24):
        known = day if hour < 21 else day - timedelta(days=1)
        if number(known) < 0:
            continue
        at = datetime(known.year, known.month, known.day, hour, 30, tzinfo=timezone.utc)
        c = (hour * 5 + number(day)) % CUSTOMERS
        yield {
            "product": PRODUCTS[hour % 3],
            "order_id": f"{known:%m%d}-{hour:02d}",
            "customer": f"c{c:02d}",
            "quantity": hour % 4 + 1,
            "ordered_at": at.isoformat(),
        }


def deliver(landing: Path, day: date) -> None:
    """Writes a day's dump and orders; each file appears when it is complete."""
    dump, file = landing / "customers" / f"customers_{day}.parquet", landing / "orders" / f"{day}.jsonl"
    for target in (dump, file):
        target.parent.mkdir(parents=True, exist_ok=True)
    customers(day).write_parquet(hidden := dump.with_name(f".{dump.name}"))
    hidden.rename(dump)
    (hidden := file.with_name(f".{file.name}")).write_text(
        "".join(f"{json.dumps(o)}\n" for o in orders(day))
    )
    hidden.rename(file)
