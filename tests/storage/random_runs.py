"""Random chains whose records are cut into runs at random, and a program that runs them.

``python -m tests.storage.random_runs ROOT SEED …`` takes one run after the other through Dagster's
assets; it ends when nothing is left to do. It can be killed anywhere and started again.
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

from tests.core.random_chains import SHAPES
from tests.core.random_scenarios import scenarios, write
from tests.core.reference_model import complete
from tests.through_assets import ThroughAssets
from vt_dagster.conformance.scenario import Scenario, read_scenarios
from vt_dagster.conformance.steps import inputs_of
from vt_dagster.spark.session import build_session
from vt_dagster.storage.commit_log import Offsets

Config = dict[str, Any]
DRAWN, LONGEST = 5, 12
"""How many sequences of records a seed draws of its chain, and of how many records at most."""
MOST_RUNS = 4


@dataclass(frozen=True)
class RandomChain:
    """A chain, its records in the order in which its runs take them, what the model makes of them.

    Args:
        runs: ranges of its records.
    """

    content: Config
    runs: Sequence[range]

    @property
    def refused(self) -> bool:
        """Whether its topology cannot be built."""
        return "expected_error" in self.content


def random_chain(seed: int, most_runs: int = MOST_RUNS) -> RandomChain:
    """The chain of a seed, with that one of some record sequences that shows most.

    So many seeds as there are shapes, from a multiple of that on, have every shape once.

    Args:
        most_runs: how many runs the records are cut into at most; the order of a task may ask for more.
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
    """The order in which the tasks of a chain's joins take the records of one run.

    Assets run one after the other, so a join has all that a run brings to both its sides: it takes
    the smaller head first, by each side's own stream time, the left one of equals. The model knows
    one order alone, that of the records. It is the same as long as nothing comes between two rows
    that one record gave a side.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = {s["id"]: s for s in config["steps"]}

    def of(self, name: str, before: Sequence[Config], new: Sequence[Config]) -> list[Config]:
        """Those of the new records that a run of the step can take, in its order.

        Args:
            before: what earlier runs took.
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
        """The rows that a step gives in a run: its stream time, and by which of the records."""
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
    """Chains as they are read from a file, which lies in that directory then."""
    root.mkdir(parents=True, exist_ok=True)
    write([c.content for c in chains], root / "chains.json")
    return list(read_scenarios([root / "chains.json"]))


class RandomRuns(ThroughAssets):
    """Chains as partitions of one topology; goes on after the last run done in its directory."""

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
