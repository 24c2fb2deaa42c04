"""Recorded scenarios run through real assets: files, Dagster, Spark and Delta, in successive runs.

All scenarios are partitions of one topology, as the conformance runner builds it, and share its rounds:
in each round, the next records of every scenario land as files, and assets with new records run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tests.core.reference_model import complete
from tests.market import messages, run
from vt_dagster import FilesSource, Stream, VersionedTable, build_asset
from vt_dagster.conformance.runner import (
    ScenarioOutput,
    StoreRun,
    answer_rest,
    differences,
    dropped,
    entry,
    sources,
    split_into_runs,
    store_differences,
)
from vt_dagster.conformance.scenario import Entry, Scenario, by_scenario, ms, record_of
from vt_dagster.conformance.steps import Layout, layout, nodes_of
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.errors import BufferFullError, ContractError
from vt_dagster.runs import pin as of_pins
from vt_dagster.spark.settings import small_run
from vt_dagster.storage import view as of_views
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets
from vt_dagster.storage.view import Base, View
from vt_dagster.topology.model import topological

SHAPE = StructType(
    [
        StructField("scenario", IntegerType()),
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("at", LongType()),
    ]
)
WITH_INDEX = StructType([*SHAPE.fields, StructField("index", IntegerType())])
STORE = "store"
_FEW_RUNS = 4


def leave_views_behind(monkeypatch: pytest.MonkeyPatch, many_rows: bool = False) -> None:
    """Lets views lag, as if tables were large: only every third run brings them up to the log.

    Args:
        many_rows: whether runs also look up rows as in tables of many rows.
    """
    due = View.is_due

    def is_due(self: View, base: Base | None, commit: Commit) -> bool:
        return due(self, base, commit) and (base is None or commit.batch % 3 == 0)

    monkeypatch.setattr(View, "is_due", is_due)
    if many_rows:
        monkeypatch.setattr(of_views, "MANY_ROWS", -1)
        monkeypatch.setattr(of_pins, "MANY_ROWS", -1)


class Warehouse:
    """A topology as assets, and the directories that it reads from and writes to."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.landing, self.path, self.spark = root / "landing", root / "warehouse", spark
        self.nodes: dict[str, Stream] = {}
        self.rounds = self.node_runs = 0
        self._assets: dict[str, Any] = {}
        self._instance = dg.DagsterInstance.ephemeral()

    def source(self, kind: type[Stream], name: str, **more: Any) -> Any:
        """Returns a source node that reads the files in the directory of its name."""
        directory = self.landing / name
        directory.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {
            "schema": SHAPE,
            "source": FilesSource(str(directory), max_bad_share=1),
        }
        return kind(
            name,
            key=("scenario", "key"),
            partition_by="scenario",
            timestamp="timestamp_millis(at)",
            tombstone="value is null",
            **{**about, **more},
        )

    def add(self, nodes: Iterable[Stream]) -> None:
        """Builds assets of nodes and of all their inputs."""
        for node in topological(list(nodes)):
            self.nodes[node.name] = node
            self._assets[node.name] = build_asset(node)

    def store(self, name: str) -> AssetStore:
        return AssetStore(str(self.path), self.nodes[name], self.spark)

    def commit(self, name: str) -> Commit | None:
        """Returns an asset's last commit, or None."""
        head = self.store(name).head()
        return None if head is None else head.commit

    def below(self, names: Iterable[str], without: Iterable[str] = ()) -> list[str]:
        """Returns nodes and all nodes downstream, except those of ``without`` and their downstream."""
        found, out = set(names), set(without)
        for name, node in self.nodes.items():
            inputs = {up.name for up in node.inputs}
            if inputs & found:
                found.add(name)
            if inputs & out:
                out.add(name)
        return sorted(found - out)

    def land(self, arriving: Mapping[str, Sequence[Entry]]) -> None:
        """Delivers a file of records to each of some sources; an existing file stays."""
        self.rounds += 1
        for name, records in arriving.items():
            lines = [json.dumps({**r, "at": r["timestamp"]}) + "\n" for r in records]
            file = self.landing / name / f"{self.rounds:03d}.jsonl"
            if not file.exists():
                half = file.with_suffix(".half")
                half.write_text("".join(lines), encoding="utf-8")
                half.rename(file)

    def run(self, names: Sequence[str], raise_on_error: bool = False) -> dg.ExecuteInProcessResult:
        """Materializes some assets."""
        self.node_runs += len(names)
        return run(
            self._assets.values(),
            self.path,
            selection=list(names),
            instance=self._instance,
            raise_on_error=raise_on_error,
        )

    def rows(self, name: str, what: str) -> list[Entry]:
        """Returns the log or the view of an asset, in order; no rows before its first commit."""
        if self.commit(name) is None:
            return []
        found = self.store(name).read(what)
        order = "offset" if what == "log" else "valid_from" if what == "versions" else "timestamp"
        return (
            found.orderBy("partition", *(() if what == "log" else ("key",)), order)
            .toArrow()
            .to_pylist()
        )


class ThroughAssets:
    """Scenarios as partitions of one topology of assets, and the output of each."""

    @staticmethod
    def groups(scenarios: Sequence[Scenario]) -> list[list[Scenario]]:
        """Groups the scenarios that share a topology: those with about the same number of runs.

        A node runs whenever a source above it has new records of any scenario, so scenarios of few runs
        are separate from those of many. With more groups, equal sources would run more often.
        """
        found: dict[bool | None, list[Scenario]] = defaultdict(list)
        for scenario in scenarios:
            runs = runs_of(scenario)
            found[None if runs == 1 else runs > _FEW_RUNS].append(scenario)
        return list(found.values())

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        root: Path,
        spark: SparkSession,
        cuts: Sequence[Sequence[range]] | None = None,
    ) -> None:
        """
        Args:
            cuts: the runs of each scenario, as ranges of its records; None = the fewest in its order.
        """
        self.warehouse = Warehouse(root, spark)
        self.layouts = [layout(s) for s in scenarios]
        self.shapes = nodes_of(self.layouts, self.warehouse.source)
        self.warehouse.add(self.shapes.values())
        self.cuts = [split_into_runs(each, "run") for each in self.layouts] if cuts is None else cuts
        self.failed_at: dict[int, int] = {}
        self.ends: dict[str, list[Offsets]] = defaultdict(lambda: [{}])
        """The next offsets in the log of each output, before the first run and after each run."""
        self._stuck: set[str] = set()

    @property
    def steps(self) -> range:
        """The numbers of all runs."""
        return range(max(map(len, self.cuts)))

    def run(self) -> None:
        """Makes all runs of all scenarios."""
        for step in self.steps:
            self.step(step)

    def node(self, each: Layout, step: str) -> Stream:
        return self.shapes[each.shapes[step]]

    def arriving(self, step: int) -> dict[str, list[Entry]]:
        """Returns what arrives at each source in a round, without scenarios that have failed."""
        found: dict[str, list[Entry]] = defaultdict(list)
        for number, each in enumerate(self.layouts):
            if number in self.failed_at or step >= len(self.cuts[number]):
                continue
            homes = sources(each)
            for i in self.cuts[number][step]:
                record = each.scenario.records[i]
                for shape in homes.get(record["input"], ()):
                    found[self.shapes[shape].name].append(record_of(number, record))
        return found

    def step(self, step: int) -> None:
        """Runs every asset that has new records."""
        arriving = self.arriving(step)
        names = self.warehouse.below(arriving, without=self._stuck)
        if not names:
            return
        before = {name: self.warehouse.commit(name) for name in names}
        self.warehouse.land(arriving)
        result = self.warehouse.run(names)
        failed = {str(e.step_key).split(".")[0] for e in result.all_events if e.is_step_failure}
        for name in sorted(failed):
            assert self.warehouse.commit(name) == before[name], messages(result)
            self._check_failure(name, step, messages(result))
        for name in {self.node(each, each.output).name for each in self.layouts}:
            commit = self.warehouse.commit(name)
            self.ends[name].append({} if commit is None else commit.next_offset)

    def _check_failure(self, name: str, step: int, said: str) -> None:
        """A run that fails on a full buffer commits nothing, and fails again with the same records."""
        before = self.warehouse.commit(name)
        try:
            self.warehouse.run([name], raise_on_error=True)
        except BufferFullError as error:
            self.failed_at |= {n: self.cuts[n][step][-1] for n in error.partitions}
        else:
            raise AssertionError(f"{name} failed once, and then did not:\n{said}")
        assert self.warehouse.commit(name) == before
        self._stuck.add(name)

    def differences(self, counted: bool) -> dict[str, list[str]]:
        """Returns the differences between output and expectation, by scenario.

        Args:
            counted: whether commits count the outcomes of records by partition.
        """
        outputs = sorted({self.node(each, each.output).name for each in self.layouts})
        stored = {self.node(e, e.stored).name: e for e in self.layouts if e.stored is not None}
        with small_run(self.warehouse.spark):
            logs = {name: by_scenario(self.warehouse.rows(name, "log")) for name in outputs}
            views = {name: by_scenario(self.warehouse.rows(name, self._view(name))) for name in stored}
        found: dict[str, list[str]] = {}
        for number, each in enumerate(self.layouts):
            out = ScenarioOutput(
                self._entries(number, logs[self.node(each, each.output).name][number]),
                [] if each.stored is None else views[self.node(each, each.stored).name].get(number, []),
                self._dropped(number) if counted else None,
                self.failed_at.get(number),
            )
            found[each.scenario.name] = differences(each, self.cuts[number], "run", out)
            if counted:
                found[each.scenario.name] += self._waiting(number)
        return found

    def _view(self, name: str) -> str:
        return "versions" if isinstance(self.warehouse.nodes[name], VersionedTable) else "current"

    def _entries(self, number: int, rows: Sequence[Entry]) -> list[Entry]:
        """Returns a scenario's rows of a log, each with the last record of the run that wrote it."""
        each = self.layouts[number]
        ends = [e.get(number, 0) for e in self.ends[self.node(each, each.output).name]]
        found: list[Entry] = []
        for row in rows:
            assert row["partition"] == number
            step = next(i for i, end in enumerate(ends[1:]) if row["offset"] < end)
            found.append(entry(row, each.value, self.cuts[number][step][-1]))
        return found

    def _fates(self, name: str, number: int) -> Mapping[str, int]:
        commit = self.warehouse.commit(name)
        return {} if commit is None else commit.totals_by_partition.get(number, {})

    def _dropped(self, number: int) -> int:
        nodes = [self.shapes[shape] for shape in set(self.layouts[number].shapes.values())]
        return sum(dropped(node, self._fates(node.name, number)) for node in nodes)

    def _waiting(self, number: int) -> list[str]:
        each = self.layouts[number]
        return [
            f"  waiting in {step}: expected {expected} / got {got}"
            for step, expected in waiting_records(each).items()
            if expected
            != (got := self._fates(self.node(each, step).name, number).get(Outcome.WAITING, 0))
        ]


def runs_of(scenario: Scenario) -> int:
    """Returns how many runs a scenario takes, to its end or until it must fail."""
    last = len(scenario.records) if scenario.error is None else scenario.error["trigger"]
    return sum(run[0] <= last for run in split_into_runs(layout(scenario), "run"))


def waiting_records(each: Layout) -> dict[str, int]:
    """Returns how many records wait at the end of each join with a grace period: those that are younger
    than the newest record of the buffer less the grace period."""
    found: dict[str, int] = {}
    for name, step in each.steps.items():
        if step["op"] != "stream_table_join" or not step["grace"]:
            continue
        entered = [
            r["timestamp"]
            for r in _streamed(each, step["stream"])
            if r["key"] is not None and r["value"] is not None
        ]
        found[name] = sum(t > max(entered) - step["grace"] for t in entered)
        if step["kind"] == "left" and name == each.output:
            joined = [e for e in each.scenario.expected if e["key"] is not None]
            assert found[name] == len(entered) - len(joined), each.scenario.name
    return found


def _streamed(each: Layout, stream: str) -> Sequence[Mapping[str, Any]]:
    """Returns the records of a stream: those of an input, or those that a join of the model emits."""
    step = each.steps[stream]
    if "input" in step:
        return [r for r in each.scenario.records if r["input"] == step["input"]]
    config = {"steps": list(each.steps.values()), "output": stream}
    chain = {"operator": "chain", "config": config, "records": each.scenario.records}
    return complete(chain)["expected"]


class StoreThroughAssets:
    """Scenarios of the store as partitions of one versioned table, whose rows answer the calls."""

    def __init__(self, scenarios: Sequence[Scenario], root: Path, spark: SparkSession) -> None:
        self.warehouse = Warehouse(root, spark)
        self.runs = [StoreRun(i, s) for i, s in enumerate(scenarios)]
        retention = {i: ms(s.config["history_retention"]) for i, s in enumerate(scenarios)}
        more = {"schema": WITH_INDEX, "history_retention": retention}
        self.warehouse.add([self.warehouse.source(VersionedTable, STORE, **more)])

    def run(self) -> None:
        """Processes all puts and deletes in one run, then answers the calls that come after them."""
        self._take([record for r in self.runs for record in r.writes()])
        rows = by_scenario(self.warehouse.rows(STORE, "log"))
        for r in self.runs:
            r.answer_writes({row["index"]: row["is_latest"] for row in rows[r.number]})
        answer_rest(self, self.runs)

    def _take(self, records: Sequence[Entry]) -> None:
        self.warehouse.land({STORE: records})
        result = self.warehouse.run([STORE])
        assert result.success, messages(result)

    def rejected(self) -> dict[tuple[int, str], int]:
        """Returns how many records were rejected, by scenario and reason."""
        rows = self.warehouse.store(STORE).quarantine()
        found = [] if rows is None else rows.groupBy("partition", "reason").count().collect()
        return {(row["partition"], row["reason"]): row["count"] for row in found}

    def put(self, key: Any, value: Any, timestamp: int) -> None:
        """Puts a value in a separate run.

        Raises:
            ContractError: the record went to quarantine, but not as late.
        """
        number, name = key
        before = self.rejected()
        record = {"key": name, "value": value, "timestamp": timestamp}
        self._take([record_of(number, record) | {"index": -1}])
        new = [place for place, count in self.rejected().items() if count > before.get(place, 0)]
        if new and new[0][1] != "late":
            raise ContractError(f"{key}: {new[0][1]}")

    def delete(self, key: Any, timestamp: int) -> None:
        """Deletes a key in a separate run; see ``put``."""
        self.put(key, None, timestamp)

    def get(self, key: Any, as_of: int | None = None) -> Any:
        """Returns the row that is valid at a time; None = now."""
        return self.get_each((key, as_of))[0]

    def get_each(self, *keys: Any) -> list[Entry | None]:
        """Returns the answers to many gets, each a key and a time; reads without Spark."""
        tables: dict[int | None, dict[Any, Entry]] = {}
        for _, moment in keys:
            if moment not in tables:
                as_of = None if moment is None else f"1970-01-01T00:00:{moment / 1000:06.3f}Z"
                rows = look_up(str(self.warehouse.path), STORE, as_of=as_of, partial=True)
                found = {(row["scenario"], row["key"]): row for row in rows.to_pylist()}
                tables[moment] = found
        return [tables[moment].get(key) for key, moment in keys]

    def differences(self, _counted: bool) -> dict[str, list[str]]:
        """Returns the differences to the expectation, by scenario; late records are compared too."""
        rows = by_scenario(self.warehouse.rows(STORE, "versions"))
        rejected = self.rejected()
        return {
            r.scenario.name: store_differences(
                r, "run", rows[r.number], rejected.get((r.number, "late"), 0)
            )
            for r in self.runs
        }
