"""Random chains and windows in one warehouse, whose rows the tests explain; without Dagster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import SparkSession

from tests.core.random_scenarios import scenarios
from tests.storage.random_runs import RandomChain, RandomRuns, random_chain
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of

SHORT = 24
"""The largest number of records of a sequence."""


def random_chains(seeds: Sequence[int], windows: Sequence[int]) -> list[RandomChain]:
    """Random chains and windowed aggregates of the seeds, each in two runs, without refused ones."""
    found = [random_chain(seed, most_runs=2) for seed in seeds]
    for seed in windows:
        for kind in ("fixed", "sliding"):
            (made,) = scenarios(
                seed, "windowed_aggregate", 1, 1, sliding=kind == "sliding", longest=SHORT
            )
            count = len(made["records"])
            place = Random(seed).randint(1, count - 1)
            runs = [range(place), range(place, count)]
            found.append(RandomChain({**made, "name": f"{kind} {seed}"}, runs))
    return [one for one in found if not one.refused]


class Explained(RandomRuns):
    """The chains as partitions of one topology. In each step its nodes run one after the other."""

    def build(self, spark: SparkSession) -> None:
        stores: Any = stores_of(str(self.warehouse.path), spark)
        for step in self.steps:
            self.warehouse.land(self.arriving(step))
            for node in self.warehouse.nodes.values():
                run_once(node, stores)


def run_chains(chains: Sequence[RandomChain], root: Path, spark: SparkSession) -> Explained:
    """Runs the random chains in ``root / "warehouse"``, where their rows can be explained."""
    found = Explained(chains, root, spark)
    found.build(spark)
    return found
