"""Explanations of each operator's rows: what they name gives the row, and nothing else changes it.

By the model of ``tests.core.reference``, which shares nothing with the operators: once fed with
what an explanation names, once with all records up to the one that triggered the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.core.reference.stream_join import as_here
from tests.core.reference_model import complete
from tests.explained import EPOCH, LONG, MINUTE, ROUNDS, WINDOWS, WITHIN, Warehouse
from vt_dagster import read
from vt_dagster.provenance.explain import Explainer
from vt_dagster.provenance.values import Explanation

ROWS = 40
Row = dict[str, Any]
Place = tuple[str, int]
"""An asset and an offset of its log, which has one partition."""


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    found = Warehouse(tmp_path_factory.mktemp("explained"))
    found.build(spark)
    return found


def logs_of(path: str, names: Sequence[str]) -> dict[str, list[Row]]:
    return {
        name: read(name, what="log", warehouse=path).sort_by("offset").to_pylist() for name in names
    }


# -------------------------------------------------------------------------------------- in the model


def millis(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(milliseconds=1)


def value_of(group: str | None, number: int | None) -> str | None:
    return None if number is None else f"{group}|{number}"


def pair_of(row: Row) -> str | None:
    if row["is_tombstone"]:
        return None
    left, right = (value_of(row[f"{side}g"], row[f"{side}n"]) for side in "lr")
    return f"({left or 'null'},{right or 'null'})"


VERSIONED = {"versioned": True, "history_retention": LONG // timedelta(milliseconds=1)}
PLAIN = {"versioned": False}
TABLES = {"left": VERSIONED, "right": PLAIN}


@dataclass(frozen=True)
class Case:
    """An operator in the model.

    Args:
        inputs: assets by the model's names of its inputs, in order.
        value: what a result's row is there: of an aggregate the value of a column.
        number: whether a value is its number alone, without a group.
        key: the column of the model's key.
    """

    operator: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    value: Callable[[Row], Any] = pair_of
    number: bool = False
    key: str = "k"

    def run(self, records: Sequence[tuple[str, Row]]) -> list[Row]:
        """What the model emits for records of assets."""
        names = {asset: name for name, asset in self.inputs.items()}
        given = [
            {
                "input": names[asset],
                "key": row["k"],
                "value": (None if row["n"] is None else str(row["n"]))
                if self.number
                else value_of(row["g"], row["n"]),
                "timestamp": millis(row["timestamp"]),
            }
            for asset, row in records
        ]
        scenario = {"operator": self.operator, "config": self.config, "records": given}
        if self.operator == "stream_stream_join":
            # A record of another key moves stream time, so that what has no match leaves.
            end = max(r["timestamp"] for r in given) + 10**8
            given.append({"input": "left", "key": "end", "value": "x|0", "timestamp": end})
            return as_here(scenario).emitted
        return complete(scenario)["expected"]

    def is_of(self, entry: Row, row: Row) -> bool:
        """Whether an entry is of the key (and window) of a row."""
        ends = ("window_start", "window_end")
        return entry["key"] == row[self.key] and all(
            entry[c] == millis(row[c]) for c in ends if c in entry
        )


def join(kind: str, left: str, right: str, operator: str = "table_table_join") -> Case:
    config = {"kind": kind, "left": TABLES[left], "right": TABLES[right]}
    return Case(operator, config, {"left": left, "right": right})


def total(row: Row) -> Any:
    return None if row["is_tombstone"] else str(row["sum"])


def aggregate(source: str) -> Case:
    config = {"table": TABLES[source], "group_by": "prefix", "aggregate": "sum"}
    return Case("table_aggregate", config, {"table": source}, total, key="g")


def windowed(name: str) -> Case:
    window, config = WINDOWS[name], {"type": name}
    for told, own in (("size", "size"), ("size", "time_difference"), ("advance", "advance")):
        if hasattr(window, own) and (told != "advance" or name == "hopping"):
            config[told] = getattr(window, own) // timedelta(milliseconds=1)
    if name == "session":
        config["gap"] = config.pop("size", None) or MINUTE // timedelta(milliseconds=1)
    config["grace"] = MINUTE // timedelta(milliseconds=1)
    told = {"window": config, "aggregate": "sum", "suppress": None}
    return Case("windowed_aggregate", told, {"stream": "clicks"}, total, number=True)


def of_streams(kind: str) -> Case:
    config = {n: v // timedelta(milliseconds=1) for n, v in WITHIN.items()} | {"kind": kind}
    return Case("stream_stream_join", config, {"left": "clicks", "right": "views"})


CASES = {
    "inner": join("inner", "left", "right"),
    "outer": join("outer", "left", "right"),
    "by_left": join("left", "right", "left"),
    "refers": join("inner", "left", "right", "foreign_key_join"),
    "may_refer": join("left", "left", "right", "foreign_key_join"),
    "of_left": aggregate("left"),
    "of_right": aggregate("right"),
    **{name: windowed(name) for name in WINDOWS},
    "seen": of_streams("left"),
    "either": of_streams("outer"),
}


def arrivals(case: Case, logs: Mapping[str, list[Row]]) -> list[tuple[str, Row]]:
    """All records of a case's inputs in the order in which runs took them: in each round by the largest
    timestamp so far of their own log, the left one's first."""
    found: list[tuple[tuple[int, ...], str, Row]] = []
    for side, asset in enumerate(case.inputs.values()):
        rows = logs[asset]
        size = len(rows) // ROUNDS
        for i, row in enumerate(rows):
            first = i // size * size
            so_far = max(millis(r["timestamp"]) for r in rows[first : i + 1])
            found.append(((i // size, so_far, side, i), asset, row))
    if len(case.inputs) == 1:
        return [(asset, row) for _, asset, row in found]
    return [(asset, row) for _, asset, row in sorted(found, key=lambda one: one[0])]


def named(told: Explanation) -> list[Place]:
    return [(one.asset, one.record.offset) for one in told.made_of if one.record is not None]


def last_of(case: Case, emitted: Sequence[Row], row: Row) -> tuple[Any, int] | None:
    mine = [e for e in emitted if case.is_of(e, row)]
    return (mine[-1]["value"], mine[-1]["timestamp"]) if mine else None


@pytest.mark.parametrize("name", CASES)
def test_what_it_names_gives_the_row_and_nothing_else_changes_it(
    warehouse: Warehouse, name: str
) -> None:
    case = CASES[name]
    logs = logs_of(warehouse.path, [name, *case.inputs.values()])
    explainer, every = Explainer(warehouse.path), arrivals(case, logs)
    rows = logs[name]
    asked = random.Random(name).sample(range(len(rows)), min(ROWS, len(rows)))
    assert len(asked) >= 15
    for offset in asked:
        row, told = rows[offset], explainer.explain(name, offset=(0, offset))
        places = set(named(told))
        assert places, told
        assert told.made_of_in_all == len(told.made_of)
        wanted = case.value(row), millis(row["timestamp"])
        if row["is_tombstone"] and name == "session":
            continue  # one that was merged: the next row names what it was made of
        order = [(asset, r) for asset, r in every if (asset, r["offset"]) in places]
        assert last_of(case, case.run(order), row) == wanted, told
        if case.operator == "stream_stream_join":
            got = case.run(every)
            assert wanted in [(e["value"], e["timestamp"]) for e in got], told
            continue
        end = every.index(order[-1]) + 1
        assert last_of(case, case.run(every[:end]), row) == wanted, told
