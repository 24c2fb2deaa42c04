"""A read as of a time is stale exactly if the rows valid at that time have changed since the read."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import vt_dagster
from tests.storage.topology import EPOCH, Topology
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import view
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.storage.commit_log import Offsets
from vt_dagster.storage.stale_reads import Position, Read, stale_reads
from vt_dagster.topology.durations import in_utc, parse_time
from vt_dagster.topology.model import VersionedTable

pytestmark = pytest.mark.usefixtures("few_rows")

MINUTES = [n / 2 for n in range(80)]


def at(minutes: float) -> int:
    """Epoch microseconds."""
    return parse_time((EPOCH + timedelta(minutes=minutes)).isoformat())


def read_as_of(topology: Topology, minutes: float) -> Read:
    """A read as of a time, made now."""
    _, commit = head_of(topology.warehouse, "rates")
    return Read.of("rates", commit, None, in_utc(at(minutes)), None)


Row = tuple[str, int, int, int]
"""A row of a log: key, time, partition, offset."""


def log_of(topology: Topology) -> list[Row]:
    rows = vt_dagster.read("rates", warehouse=topology.warehouse, what="log").to_pylist()
    return [(r["k"], parse_time(r["timestamp"].isoformat()), r["partition"], r["offset"]) for r in rows]


def valid_records(log: list[Row], upto: Offsets, moment: int) -> dict[str, tuple[int, int]]:
    """By key, the partition and offset of the record that is valid at a time, from the log alone."""
    found = dict[str, tuple[Any, ...]]()
    for key, time, home, offset in log:
        if offset < upto.get(home, 0) and time <= moment:
            found[key] = max(found.get(key, ()), (time, home, offset))
    return {key: (home, offset) for key, (_, home, offset) in found.items()}


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.endurance) for s in (2, 3))])
def test_read_is_stale_iff_valid_rows_changed(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Versions are late, replaced, deleted or expired, in two partitions; the view may be behind."""
    monkeypatch.setattr(view, "SEGMENT_ROWS", 5)
    monkeypatch.setattr(view, "EACH_RUN", 0)
    monkeypatch.setattr(view, "SHARE", 0.4)
    monkeypatch.setattr("vt_dagster.storage.stale_reads._ROWS", 4)
    dice, topology = random.Random(seed), Topology(tmp_path)
    topology.rates = VersionedTable(
        "rates",
        key="k",
        schema=topology.rates.schema,
        tombstone="n is null",
        history_retention=timedelta(minutes=10),
        source=FilesSource(str(tmp_path / "rates"), max_bad_share=1.0),
        partitions=2,
    )
    now, reads, looked_at = 0.0, list[Read](), list[Read]()
    wrong_ones = right_ones = 0
    for run in range(7 if seed > 1 else 5):
        records = list[tuple[str | None, int | None, float]]()
        for _ in range(20 if run == 0 else dice.choice([1, 3, 6])):
            now += dice.choice([0, 0, 0.5, 1, 3])
            moment = max(0.0, now - dice.choice([0, 0, 3, 5, 9]))
            records.append((dice.choice("abcdef"), dice.choice([None, 1, 2, 3]), moment))
        topology.land("rates", f"{run}.jsonl", records)
        topology.run("rates", spark)
        head, log = head_of(topology.warehouse, "rates"), log_of(topology)
        commit = head[1]
        horizon = commit.shape.version_rules.horizon(commit.stream_time)
        for some in (reads, looked_at):
            found = stale_reads(topology.warehouse, head, some)
            for read, why in zip(some, found, strict=True):
                moment = parse_time(read.as_of or "")
                assert why is None or why.forgotten == (moment < horizon)
                if moment < horizon:
                    continue
                before = valid_records(log, read.next_offset, moment)
                changed = before != valid_records(log, commit.next_offset, moment)
                assert (why is not None) == changed, (run, read, before)
                wrong_ones, right_ones = wrong_ones + changed, right_ones + (not changed)
        reads += [read_as_of(topology, m) for m in MINUTES if now - 9 <= m <= now + 1]
        looked_at = [read.looked_at(Position.after(commit)) for read in reads]
    assert wrong_ones > 20
    assert right_ones > 20
