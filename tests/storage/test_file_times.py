"""``recorded_at="file_time"``: a run of many files answers as one run a file, at their times, does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import vt_dagster
from tests.storage.test_known_at import START, answer, in_order, moment, questions
from tests.storage.topology import Topology
from vt_dagster.columns import RECORDED_AT
from vt_dagster.errors import SourceError
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files import FilesSource
from vt_dagster.storage import commits
from vt_dagster.storage.store import stores_of

HOUR = 3_600_000_000
FILES: dict[str, dict[str, tuple[int, list[tuple[str | None, int | None, float]]]]] = {
    "rates": {
        "1": (0, [("a", 1, 0), ("b", 1, 1), ("a", 2, 5)]),
        "2": (4, [("a", 3, 3), ("b", None, 12), ("a", 9, 1), ("c", 1, 14)]),
        "3": (3, [("c", 2, 14), ("a", 8, 4)]),  # written before 2
        "4": (8, [("a", 7, 26), ("b", 5, 16)]),
        "5": (9, [("b", 6, 20), ("d", 1, 27)]),
        "6": (7, [("a", 6, 19), ("b", 4, 17)]),  # of the second run, written before the first was
    },
    "orders": {
        "1": (2, [("a", 1, 4), ("b", 2, 4)]),
        "2": (5, [("a", 3, 4), ("b", 4, 13), ("a", 5, 0), ("c", 6, 15)]),
        "3": (10, [("a", 7, 25), ("a", 8, 4), ("b", 9, 18), ("d", 1, 30)]),
        "4": (12, []),
    },
}
TIMES = [(0, 0), (4, 0), (4, 0), (8, 0), (9, 0), (9, 1)]
"""Of the files of ``rates``, as they count: hours, and microseconds after them."""


def at(hours: int, micros: int = 0) -> int:
    return START + hours * HOUR + micros


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> tuple[Topology, str]:
    """Tables of two runs that were told the files' times; and a warehouse of a run a file."""
    topology = Topology(tmp_path_factory.mktemp("files"))
    for name, files in FILES.items():
        for file, (hours, records) in files.items():
            topology.land(name, f"{file}.jsonl", records)
            os.utime(topology.root / name / f"{file}.jsonl", ns=(0, at(hours) * 1000))
    ones = str(topology.root / "ones")
    for node in (topology.rates, topology.orders):
        assert isinstance(node.source, FilesSource)
        told = replace(node, source=replace(node.source, recorded_at="file_time"))
        files = [f"{file}.jsonl" for file in FILES[node.name]]
        runs = [files[:5], files[5:]] if node is topology.rates else [files]
        for only in runs:
            run_once(told, stores_of(topology.warehouse, spark), only=only)
        times = [at(*t) for t in TIMES]
        if node is topology.orders:
            times = [at(hours) for hours, _ in FILES["orders"].values()]
        for file, time in zip(files, times, strict=True):
            run_once(node, stores_of(ones, spark), only=[file], recorded_at=time)
    return topology, ones


def test_each_row_has_the_time_of_its_file(both: tuple[Topology, str]) -> None:
    topology, ones = both
    for name in FILES:
        one, other = (
            vt_dagster.read(name, warehouse=w, what="log") for w in (topology.warehouse, ones)
        )
        assert in_order(one) == in_order(other)
    first, second = commits.commits(f"{topology.warehouse}/rates")
    assert [step.recorded_at for step in first.steps] == [at(0), at(4), at(8)]
    assert (first.recorded_at, second.recorded_at, second.steps) == (at(9), at(9, 1), [])


@pytest.mark.parametrize("name", FILES)
def test_any_time_is_answered_as_by_a_run_a_file(
    both: tuple[Topology, str], spark: SparkSession, name: str
) -> None:
    topology, ones = both
    kind = "versioned" if name == "rates" else "stream"
    for known in (
        at(0) - 1,
        at(0),
        at(2),
        at(4) - 1,
        at(4),
        at(8) - 1,
        at(8),
        at(9),
        at(9, 1),
        at(11),
        at(12),
    ):
        for asked in questions(kind):
            found, expected = (
                answer(w, name, moment(known), **asked) for w in (topology.warehouse, ones)
            )
            assert found == expected, (known - START, asked)
    store = topology.store(name, spark)
    what: Any = "versions" if kind == "versioned" else "log"
    by_spark = store.read(what, as_known_at=moment(at(5)))
    assert in_order(by_spark.toArrow()) == answer(ones, name, moment(at(5)), what=what)


def test_joins_by_what_was_known_follow_the_files(
    both: tuple[Topology, str], spark: SparkSession
) -> None:
    """Of a backfill: also what the table had forgotten by then."""
    topology, ones = both
    joined = topology.orders.left_join(
        topology.rates,
        name="known",
        select=["left.*", "right.n as rate", "right.valid_from as since"],
        as_known="when_recorded",
    )
    found: list[list[tuple[Any, ...]]] = []
    for warehouse in (topology.warehouse, ones):
        run_once(joined, stores_of(warehouse, spark))
        rows = vt_dagster.read("known", warehouse=warehouse, what="log").drop_columns([RECORDED_AT])
        found.append(in_order(rows))
    assert found[0] == found[1]
    orders = vt_dagster.read("orders", warehouse=topology.warehouse, what="log").to_pylist()
    results = vt_dagster.read("known", warehouse=topology.warehouse, what="log").to_pylist()
    by_place = {row["offset"]: row["rate"] for row in results}
    for row in orders:
        about = {"as_of": row["timestamp"], "as_known_at": row[RECORDED_AT], "partial": True}
        then = vt_dagster.read("rates", warehouse=ones, key=row["k"], **about)
        assert then["n"].to_pylist() == [n for n in [by_place[row["offset"]]] if n is not None]
    assert [by_place[row["offset"]] for row in orders] == EXPECTED


EXPECTED = [1, 1, 8, None, None, 2, 6, None, 4, 1]


def test_a_run_has_no_time_after_its_own(tmp_path: Path, spark: SparkSession) -> None:
    topology = Topology(tmp_path)
    topology.land("orders", "1.jsonl", [("a", 1, 1)])
    os.utime(tmp_path / "orders" / "1.jsonl", (4_102_444_800, 4_102_444_800))  # 2100
    source = FilesSource(str(tmp_path / "orders"), recorded_at="file_time")
    told = replace(topology.orders, source=source)
    receipt = run_once(told, stores_of(topology.warehouse, spark))
    assert receipt.commit is not None
    assert receipt.commit.recorded_at < 4_102_444_800 * 10**6
    (row,) = vt_dagster.read("orders", warehouse=topology.warehouse, what="log").to_pylist()
    assert moment(receipt.commit.recorded_at) == moment(round(row[RECORDED_AT].timestamp() * 1e6))


def test_it_is_a_word(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="must be 'run' or 'file_time', got 'modified'"):
        FilesSource(str(tmp_path), recorded_at="modified")  # pyright: ignore[reportArgumentType]
