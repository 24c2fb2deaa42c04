"""Random chains whose records are split into runs at random, and a program that runs them.

``python -m tests.storage.random_runs ROOT SEED …`` does one run after the other through Dagster's
assets, and ends when no run is left. It can be killed at any point and started again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import SparkSession

from tests.asset_scenarios import ThroughAssets
from tests.core.random_chains import SHAPES
from tests.core.random_scenarios import scenarios, write
from tests.core.reference_model import complete
from vt_dagster.conformance.scenario import Scenario, read_scenarios
from vt_dagster.conformance.steps import inputs_of
from vt_dagster.spark.session import build_session
from vt_dagster.storage.commit_log import Offsets

Config = dict[str, Any]
DRAWN, LONGEST = 5, 12
"""The number of record sequences that a seed draws for its chain, and the most records of one."""
MOST_RUNS = 4


@dataclass(frozen=True)
class RandomChain:
    """A chain, its records in the order in which its runs consume them, and the model's output.

    Args:
        runs: the range of records of each run.
    """

    content: Config
    runs: Sequence[range]

    @property
    def refused(self) -> bool:
        """Whether its topology cannot be built."""
        return "expected_error" in self.content


def random_chain(seed: int, most_runs: int = MOST_RUNS) -> RandomChain:
    """The chain of a seed. Of the drawn record sequences it has the one with the longest output.

    If n is the number of shapes, n consecutive seeds from a multiple of n on have every shape once.

    Args:
        most_runs: the most runs to split the records into; the order of a task may require more runs.
    """
    block, place = divmod(seed, len(SHAPES))
    drawn = scenarios(block, "chain", configs=len(SHAPES), sequences=DRAWN, longest=LONGEST)
    found = drawn[place * DRAWN : (place + 1) * DRAWN]
    random = Random(seed)
    chains = [_cut(random, each, most_runs) for each in found]
    chain = max(chains, key=lambda c: len(c.content["expected"]))
    return RandomChain({**chain.content, "name": f"seed {seed}"}, chain.runs)


def _cut(random: Random, scenario: Config, most_runs: int) -> RandomChain:
    records = scenario["records"]
    count = min(random.randint(2, most_runs), len(records))
    places = sorted(random.sample(range(1, len(records)), count - 1))
    order = _Order(scenario["config"])
    taken: list[Config] = []
    left: list[Config] = []
    ends = [0]
    for first, last in pairwise([0, *places, len(records)]):
        left += records[first:last]
        while left:
            run = order.of(scenario["config"]["output"], taken, left)
            left = [r for r in left if all(r is not t for t in run)]
            taken += run
            ends.append(len(taken))
            if last < len(records):
                break
    content = complete({**scenario, "records": taken})
    error = content.get("expected_error")
    assert error is None or error["at"] == "build", "so few records fill no buffer that stops a chain"
    return RandomChain(content, [range(a, b) for a, b in pairwise(ends)])


class _Order:
    """The order in which the tasks of a chain's joins process the records of one run.

    Assets run one after the other, so a join has all rows that a run adds to both its sides. It takes
    the head with the smaller stream time of its own side first; of equal ones, the left one. The
    model knows only one order, that of the records. Both orders are the same as long as no row of the
    other side comes between two rows of one side that the same record produced.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = {s["id"]: s for s in config["steps"]}

    def of(self, name: str, before: Sequence[Config], new: Sequence[Config]) -> list[Config]:
        """The new records that a run of the step can process, in the step's order.

        Args:
            before: the records of earlier runs.
        """
        step = self.steps[name]
        sides = inputs_of(step)
        if not sides:
            return [r for r in new if r["input"] == step["input"]]
        ordered = [self.of(side, before, new) for side in sides]
        if len(sides) == 1:
            return ordered[0]
        if step["op"] == "stream_table_join":
            return ordered[1] + ordered[0]
        rows = [self._rows(side, before, one) for side, one in zip(sides, ordered, strict=True)]
        return self._merged(rows, ordered)

    def _rows(
        self, name: str, before: Sequence[Config], records: Sequence[Config]
    ) -> list[tuple[int, int]]:
        """The rows that a step outputs in a run: the stream time and the causing record of each."""
        config = self.config | {"output": name}
        chain = {"operator": "chain", "config": config, "records": [*before, *records]}
        rows = [r for r in complete(chain)["expected"] if r["trigger"] >= len(before)]
        times = accumulate((r["timestamp"] for r in rows), max)
        return [(at, r["trigger"] - len(before)) for at, r in zip(times, rows, strict=True)]

    @staticmethod
    def _merged(
        rows: Sequence[Sequence[tuple[int, int]]], records: Sequence[Sequence[Config]]
    ) -> list[Config]:
        merged = sorted((at, side, i) for side in (0, 1) for i, (at, _) in enumerate(rows[side]))
        found: list[Config] = []
        taken, left = [0, 0], [[by for _, by in one] for one in rows]
        for _, side, _ in merged:
            other = 1 - side
            if left[other] and left[other][0] < taken[other]:
                return found
            by = left[side].pop(0)
            found += records[side][taken[side] : by + 1]
            taken[side] = max(taken[side], by + 1)
        return found + [r for one, count in zip(records, taken, strict=True) for r in one[count:]]


def as_scenarios(chains: Sequence[RandomChain], root: Path) -> list[Scenario]:
    """Writes the chains into a file below ``root``, and returns the scenarios read from it."""
    root.mkdir(parents=True, exist_ok=True)
    write([c.content for c in chains], root / "chains.json")
    return list(read_scenarios([root / "chains.json"]))


class RandomRuns(ThroughAssets):
    """Runs chains as partitions of one topology, and continues after the last run of its directory."""

    def __init__(self, chains: Sequence[RandomChain], root: Path, spark: SparkSession) -> None:
        super().__init__(as_scenarios(chains, root), root, spark, [c.runs for c in chains])
        self._done = root / "done.json"
        if self._done.exists():
            self._remember(json.loads(self._done.read_text(encoding="utf-8")))

    def _remember(self, done: dict[str, list[dict[str, int]]]) -> None:
        for name, ends in done.items():
            self.ends[name] = [{int(p): offset for p, offset in end.items()} for end in ends]
            self.warehouse.rounds = len(ends) - 1

    @property
    def left(self) -> range:
        """The runs that are not done."""
        return self.steps[self.warehouse.rounds :]

    def step(self, step: int) -> None:
        super().step(step)
        half = self._done.with_suffix(".half")
        ends: dict[str, list[Offsets]] = dict(self.ends)
        half.write_text(json.dumps(ends), encoding="utf-8")
        half.rename(self._done)


if __name__ == "__main__":
    conf = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"}
    session = build_session("random chains", master="local[2]", conf=conf)
    runs = RandomRuns([random_chain(int(seed)) for seed in sys.argv[2:]], Path(sys.argv[1]), session)
    for number in runs.left:
        runs.step(number)
    print("done")
