"""Logs that are cut off: every answer that is promised stays, every other names the limit, and no
consumer loses a record."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import vt_dagster
from tests.storage.test_known_at import FIRST, MINUTE, answer, in_order, moment, questions
from tests.storage.topology import Topology
from vt_dagster.columns import RECORDED_AT
from vt_dagster.errors import ConcurrentRunError, StorageError, TopologyError

from vt_dagster.runs.audit import audit
from vt_dagster.runs.cut import cut_logs
from vt_dagster.runs.erase import erase
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.storage import delta
from vt_dagster.storage.positions import Commit
from vt_dagster.storage.store import AssetStore, stores_of
from vt_dagster.topology.model import Stream
from vt_dagster.topology.training_set import FeatureView, TrainingSet

RETENTION = timedelta(minutes=8)
"""Of each log: so much is recorded in one or two rounds."""
ROUND = 10 * MINUTE


class Kept(Topology):
    """``rates`` and ``orders`` with a log retention, and joins that read them again."""

    def __init__(self, root: Path, retention: timedelta = RETENTION) -> None:
        super().__init__(root)
        self.rates = replace(self.rates, log_retention=retention)
        self.orders = replace(self.orders, log_retention=retention)
        self.fixed = self.orders.left_join(
            self.rates,
            name="fixed",
            corrected_for=timedelta(minutes=6),
            grace_period=timedelta(minutes=2),
            select=["left.*", "right.n as rate"],
        )
        self.near = self.orders.left_join(
            self.orders,
            name="near",
            before=timedelta(minutes=3),
            grace=timedelta(minutes=1),
            select=["left.n", "right.n as other"],
        )
        self.nodes: list[Stream] = [self.rates, self.orders, self.fixed, self.near]

    def round(self, number: int, spark: SparkSession, only: Sequence[str] = ()) -> None:
        """Runs of all assets, recorded at a time that is the same in each copy."""
        at = FIRST + number * ROUND
        for node in self.nodes:
            if not only or node.name in only:
                run_once(node, stores_of(self.warehouse, spark), recorded_at=at)

    def cut(self, number: int, spark: SparkSession, **more: Any) -> tuple[dict[str, int], list[str]]:
        """Shortly after a round."""
        told: list[str] = []
        now = FIRST + number * ROUND + MINUTE
        done = cut_logs(self.warehouse, spark, self.nodes, now=now, tell=told.append, **more)
        return done, told

    def commit(self, name: str) -> Commit:
        found = delta.last_commit(f"{self.warehouse}/{name}/log")
        assert found is not None
        return Commit.model_validate(found.document)


def land_round(topology: Topology, number: int, chance: random.Random) -> None:
    """Random records around the round's time, some out of order, late or deletions."""
    for name in ("rates", "orders"):
        records = [
            (chance.choice("abc"), chance.choice([None, 1, 2, 3]), 10 * number + chance.randint(-6, 6))
            for _ in range(8)
        ]
        told = [(k, n if name == "rates" or n else 5, t) for k, n, t in records]
        topology.land(name, f"{number}.jsonl", told)


def copy_of(topology: Topology, place: Path) -> Kept:
    shutil.copytree(topology.root, place)
    return Kept(place)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Kept:
    """After two rounds; nothing was cut off."""
    topology = Kept(tmp_path_factory.mktemp("begun"))
    chance = random.Random(7)
    for number in range(2):
        land_round(topology, number, chance)
        topology.round(number, spark, () if number else ("rates", "orders"))
    return topology


def rows_of(topology: Kept, name: str, what: str | None = None) -> list[Any]:
    rows = vt_dagster.read(name, warehouse=topology.warehouse, what=what)
    return in_order(rows.drop_columns([RECORDED_AT]))


def kept_rows(topology: Kept, name: str, whole: Kept, known: str | None) -> list[Any]:
    """The rows of the log of another copy, without those that are cut off here."""
    rows = vt_dagster.read(name, warehouse=whole.warehouse, what="log", as_known_at=known)
    commit = topology.commit(name)
    places = zip(rows.column("partition").to_pylist(), rows.column("offset").to_pylist(), strict=True)
    return in_order(rows.filter([o >= commit.kept_from(p) for p, o in places]))


def same_answers(topology: Kept, whole: Kept, rounds: int) -> tuple[int, int]:
    """Compares what both answer as known at each round; gives how many questions had the same answer
    and how many were refused."""
    same = refused = 0
    for name, kind in (("rates", "versioned"), ("orders", "stream"), ("fixed", "table")):
        since = topology.commit(name).cut
        for number in range(rounds):
            for known in (FIRST + number * ROUND, FIRST + (number + 1) * ROUND - 1):
                for asked in questions(kind) if name != "fixed" else [{}]:
                    if "key" in asked and name == "orders":
                        continue
                    found = answer(topology.warehouse, name, moment(known), **asked)
                    if since is not None and known < since.recorded_at:
                        assert f"expected a time from {moment(since.recorded_at)} on" in found
                        refused += 1
                        continue
                    wanted = answer(whole.warehouse, name, moment(known), **asked)
                    if asked.get("what") == "log" and "key" not in asked:
                        wanted = kept_rows(topology, name, whole, moment(known))
                    elif asked.get("what") == "log":
                        continue
                    assert found == wanted, (name, moment(known), asked)
                    same += 1
    return same, refused


def test_what_is_promised_stays_and_the_rest_names_the_limit(
    begun: Kept, tmp_path: Path, spark: SparkSession
) -> None:
    """Random arrivals; cuts between runs change no result of a consumer: a join with grace, a corrected
    one, and one of a stream with itself, each of which reads logs again."""
    whole, topology = copy_of(begun, tmp_path / "whole"), copy_of(begun, tmp_path / "cut")
    done, told = topology.cut(1, spark, keep=timedelta(0))
    assert set(done) <= {"rates", "orders"}
    assert done["rates"] > 0, told
    first = topology.commit("rates")
    chance = random.Random(11)
    for number in (2, 3):
        state = chance.getstate()
        for one in (whole, topology):
            chance.setstate(state)
            land_round(one, number, chance)
            one.round(number, spark)
        done, told = topology.cut(number, spark)
    assert topology.commit("orders").cut is not None, told
    second = topology.commit("rates")
    assert first.cut is not None
    assert second.cut is not None
    assert second.cut.batch > first.cut.batch
    for name in ("fixed", "near"):
        assert rows_of(topology, name, "log") == rows_of(whole, name, "log")
    for what in ("current", "versions"):
        assert rows_of(topology, "rates", what) == rows_of(whole, "rates", what)
    same, refused = same_answers(topology, whole, 4)
    assert (same > 40, refused > 40) == (True, True)
    for node in topology.nodes:
        assert [f for f in audit(AssetStore(topology.warehouse, node, spark)) if not f.passed] == []
