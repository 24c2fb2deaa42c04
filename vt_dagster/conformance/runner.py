"""Reads scenarios, runs similar ones together, and compares the results with those of Kafka Streams.

A scenario of the versioned store is a list of calls (put, delete, get) with the expected answers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import typer
from pyspark.sql import SparkSession

from vt_dagster.conformance.scenario import (
    OPERATORS,
    Entry,
    Granularity,
    Job,
    Report,
    Scenario,
    ScenarioOutcome,
    by_scenario,
    compare,
    compare_state,
    final_store,
    millis,
    ms,
    read_scenarios,
    record_of,
    settle,
    source,
    text,
    with_index,
)
from vt_dagster.conformance.steps import Config, Layout, Shape, inputs_of, layout, nodes_of, supported
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import (
    ContractError,
    RefusedRecordsError,
    SourceError,
    TopologyError,
)
from vt_dagster.spark.session import build_session
from vt_dagster.storage.delta import require_writable
from vt_dagster.testing import REFUSED, TopologyTestDriver, VersionedStore
from vt_dagster.topology.model import Stream, VersionedTable

# Scenarios run together


def side_by_side(
    scenarios: Sequence[Scenario], granularity: Granularity, results: Mapping[Scenario, ScenarioOutcome]
) -> list[Job]:
    """Returns jobs that run scenarios together, each as a partition of a shared topology.

    ``record``: a run is one record. If only the records of a stream trigger results, a run also takes
    the records of tables before that record. The results are the same, since tables are read first.

    ``run``: a run is the consecutive records of one input, followed by those of the stream that is
    joined with it. For a join of two source tables a run is the records that a Kafka Streams task takes
    in the recorded order; records that the tables reject do not count. Both keep the order of arrival.
    Without held-back records the log must be equal, order included. A run emits held-back records after
    its last record, so for each run the set of emitted records must be equal to that of its records one
    by one. Scenarios whose result depends on each record (``Layout.one_by_one``) run record by record.
    """

    def job(group: Sequence[Layout]) -> Job:
        def run(spark: SparkSession) -> None:
            try:
                _Group(group, granularity, spark).run(results)
            except Exception as error:  # whatever Spark, its Java, or Arrow raises
                if len(group) > 1:
                    # Only the scenarios at fault are to differ.
                    for part in (group[: len(group) // 2], group[len(group) // 2 :]):
                        job(part).run(spark)
                    return
                first = str(error).strip().split("\n", 1)[0]
                message = f"  run: expected none / got the error {type(error).__name__}: {first}"
                settle(results[group[0].scenario], [message])

        nodes = {s for each in group for s in each.shapes.values()}
        return Job(_longest(group, granularity) * len(nodes), run)

    return [job(g) for g in _grouped([layout(s) for s in scenarios], granularity)]


def _longest(group: Sequence[Layout], granularity: Granularity) -> int:
    return max(len(split_into_runs(each, granularity)) for each in group)


def _grouped(layouts: Sequence[Layout], granularity: Granularity) -> list[list[Layout]]:
    """Groups the layouts that run together: equal shapes, and shapes that share enough nodes.

    The cost of a group is the number of runs of its longest scenario times the number of its nodes.
    """
    alike: dict[tuple[Any, ...], list[Layout]] = defaultdict(list)
    for each in layouts:
        slow = granularity == "run" and each.one_by_one
        alike[(slow, *each.shapes.values())].append(each)
    found: list[tuple[bool, int, set[Shape], list[Layout]]] = []
    runs = {each: _longest(some, granularity) for each, some in alike.items()}
    for (slow, *shapes), some in sorted(alike.items(), key=lambda item: -runs[item[0]]):
        own = runs[(slow, *shapes)]
        costs = [
            (longest * len(set(shapes) - theirs), i)
            for i, (other, longest, theirs, _) in enumerate(found)
            if other == slow and set(shapes) & theirs
        ]
        if costs and min(costs)[0] <= _PAYS * own * len(shapes):
            _, _, theirs, group = found[min(costs)[1]]
            theirs |= set(shapes)
            group += some
        else:
            found.append((slow, own, set(shapes), list(some)))
    return [group for *_, group in found]


_PAYS = 0.7
"""Two groups are merged if their common cost is at most this share of their separate costs. Below 1,
because in a larger group more node runs have no records."""


def split_into_runs(each: Layout, granularity: Granularity) -> list[range]:
    """Returns the runs of a scenario, as ranges of its records."""
    records = each.scenario.records
    streams = {s["input"] for s in each.steps.values() if s["op"] == "stream"}
    joined = each.steps[each.output]["op"] == "stream_table_join"
    many = granularity == "run" and not each.one_by_one
    if many and (sides := _joined_sources(each)):
        return _in_task_order(records, sides)

    def together(one: Mapping[str, Any], next_one: Mapping[str, Any]) -> bool:
        of_stream = one["input"] in streams
        if next_one["input"] == one["input"]:
            return many or (joined and not of_stream and not each.one_by_one)
        return joined and not of_stream and next_one["input"] in streams

    cuts = [i for i in range(1, len(records)) if not together(records[i - 1], records[i])]
    return [range(a, b) for a, b in pairwise([0, *cuts, len(records)]) if b > a]


def _joined_sources(each: Layout) -> list[Config]:
    """Returns the two sources of a table-table or stream-stream join, left first, if the join is the
    only node with two inputs."""
    joins = [inputs for s in each.steps.values() if len(inputs := inputs_of(s)) == 2]
    sides = [[each.steps[i] for i in inputs] for inputs in joins]
    alike = ([["table", "table"]], [["stream", "stream"]])
    return sides[0] if [[s["op"] for s in both] for both in sides] in alike else []


def _in_task_order(records: Sequence[Mapping[str, Any]], sides: Sequence[Config]) -> list[range]:
    """Returns runs in which a task, which takes the head with the smaller timestamp, keeps the recorded
    order.

    Only records that enter a source's log count: a run never reads the others.
    """
    cuts: list[int] = []
    newest: dict[int, int] = {}
    last: tuple[int, int] = (-1, 0)
    for i, side in _logged(records, sides):
        at = records[i]["timestamp"]
        time = max(newest.get(side, -1), at)
        if (time, side) < last:
            cuts.append(i)
            newest, time = {}, at
        newest[side], last = time, (time, side)
    return [range(a, b) for a, b in pairwise([0, *cuts, len(records)]) if b > a]


def _logged(records: Sequence[Mapping[str, Any]], sides: Sequence[Config]) -> Iterator[tuple[int, int]]:
    """Yields the number and the side of each record that enters a log: all records of streams, and
    those that tables accept. A table accepts records with a key; a versioned one only those that are
    not older than its history retention (KIP-889)."""
    accepted = [-1] * len(sides)
    for i, record in enumerate(records):
        for side, step in enumerate(sides):
            if record["input"] != step["input"]:
                continue
            if step["op"] == "stream":
                yield i, side
                continue
            if record["key"] is None:
                continue
            table, at = step["table"], record["timestamp"]
            if not table["versioned"] or at >= accepted[side] - table["history_retention"]:
                accepted[side] = max(accepted[side], at)
                yield i, side


@dataclass(frozen=True)
class ScenarioOutput:
    """The output of a scenario.

    Args:
        entries: in order; ``trigger`` is the last record of the run that emitted the entry.
        store: the rows of the compared store.
        dropped: the number of dropped records; None = not counted.
        failed_at: the record at which the scenario stopped; None = it did not.
    """

    entries: Sequence[Entry]
    store: Sequence[Entry]
    dropped: int | None
    failed_at: int | None = None


def differences(
    each: Layout, cuts: Sequence[range], granularity: Granularity, out: ScenarioOutput
) -> list[str]:
    """Returns the differences between the expected and the actual output of a scenario in some runs."""
    ends = {i: run[-1] for run in cuts for i in run}
    expected: list[Entry] = list(each.scenario.expected)
    got = out.entries
    if granularity == "run":
        expected = [{**e, "trigger": ends[e["trigger"]]} for e in expected]
    found = compare("entry", expected, got)
    return found + compare_state(each.scenario, final_store(out.store), out.dropped, out.failed_at)


def dropped(node: Stream, outcomes: Mapping[str, int]) -> int:
    """Returns a node's share of Kafka's dropped-records-total, from its outcomes."""
    # Late records of a join with a grace period are joined at once, not dropped.
    late = outcomes.get(Outcome.LATE, 0) if processor_of(node).plan().drops_late else 0
    return late + outcomes.get(Outcome.QUARANTINED, 0) + outcomes.get(Outcome.DROPPED, 0)


class _Group:
    """Scenarios as partitions of one topology, and the output of each."""

    def __init__(self, group: Sequence[Layout], granularity: Granularity, spark: SparkSession) -> None:
        self.layouts = group
        self.granularity: Granularity = granularity
        self.nodes = nodes_of(group)
        self.driver = TopologyTestDriver(*self.nodes.values(), spark=spark)
        self.cuts = [split_into_runs(each, granularity) for each in group]
        self.entries: dict[int, list[Entry]] = defaultdict(list)
        self.failed_at: dict[int, int] = {}

    def run(self, results: Mapping[Scenario, ScenarioOutcome]) -> None:
        outputs = dict.fromkeys(self._node(e, e.output) for e in self.layouts)
        for step in range(max(map(len, self.cuts))):
            left = {n: runs for n, runs in enumerate(self.cuts) if n not in self.failed_at}
            cuts = {n: runs[step] for n, runs in left.items() if step < len(runs)}
            if not cuts:
                break
            self._step(cuts)
            for name in outputs:
                for number, rows in by_scenario(self.driver.read(name)).items():
                    each = self.layouts[number]
                    if self._node(each, each.output) == name:
                        last = cuts[number][-1]
                        self.entries[number] += [entry(r, each.value, last) for r in rows]
        stores = self._stores()
        for number, each in enumerate(self.layouts):
            settle(results[each.scenario], self._differences(number, stores))

    def _node(self, each: Layout, step: str) -> str:
        return self.nodes[each.shapes[step]].name

    def _step(self, cuts: dict[int, range]) -> None:
        """Runs all scenarios that have not failed; repeats the run without those that fail now."""
        while True:
            inputs: dict[str, list[Entry]] = defaultdict(list)
            for number, run in cuts.items():
                each = self.layouts[number]
                homes = sources(each)
                for i in run if number not in self.failed_at else ():
                    record = each.scenario.records[i]
                    for shape in homes.get(record["input"], ()):
                        inputs[self.nodes[shape].name].append(record_of(number, record))
            try:
                self.driver.run(inputs)
            except RefusedRecordsError as error:
                self.failed_at |= {n: cuts[n][-1] for n in error.partitions}
            else:
                return

    def _stores(self) -> dict[str, dict[int, list[Entry]]]:
        """Returns the rows of the compared stores, by node and scenario."""
        stores: dict[str, dict[int, list[Entry]]] = {}
        for each in self.layouts:
            node = None if each.stored is None else self.nodes[each.shapes[each.stored]]
            if node is not None and node.name not in stores:
                view = self.driver.versions if isinstance(node, VersionedTable) else self.driver.table
                stores[node.name] = by_scenario(view(node.name))
        return stores

    def _differences(self, number: int, stores: Mapping[str, dict[int, list[Entry]]]) -> list[str]:
        each = self.layouts[number]
        nodes = [self.nodes[shape] for shape in set(each.shapes.values())]
        out = ScenarioOutput(
            self.entries[number],
            [] if each.stored is None else stores[self._node(each, each.stored)].get(number, []),
            sum(dropped(node, self.driver.metrics(node.name, number)) for node in nodes),
            self.failed_at.get(number),
        )
        return differences(each, self.cuts[number], self.granularity, out)


def sources(each: Layout) -> dict[str, set[Shape]]:
    """Returns, by input of a scenario, the shapes of the sources that read it."""
    found: dict[str, set[Shape]] = defaultdict(set)
    for name, step in each.steps.items():
        if "input" in step:
            found[step["input"]].add(each.shapes[name])
    return found


def entry(row: Entry, value: str, trigger: int) -> Entry:
    """Returns a log row in the form of a scenario's entries."""
    found = {
        "trigger": trigger,
        "key": row["key"],
        "value": None if row["is_tombstone"] else text(row[value]),
        "timestamp": millis(row["timestamp"]),
    }
    ends = ("window_start", "window_end")
    return found | {end: millis(row[end]) for end in ends if end in row}


# Runner


_THREADS = 2
"""Two threads, since a run mostly waits for Spark's planner."""


def run(
    paths: Iterable[Path | str],
    operators: Sequence[str] | None = None,
    granularity: Granularity = "record",
    json_file: Path | None = None,
    spark: SparkSession | None = None,
    echo: Callable[[str], Any] = print,
) -> Report:
    """Runs the scenarios of files and directories and prints the comparison.

    At granularity ``record`` each record that can trigger output is a run of its own, and output is
    compared entry by entry, with trigger and order. At granularity ``run`` a run reads as many records
    as possible without changing results: ``versioned_stores`` and ``side_by_side`` document what is
    compared.

    Args:
        paths: scenario files, or directories to search for ``*.json``.
        operators: run only these; None = all. Limits in bytes are not supported.
        granularity: ``record`` or ``run``.
        json_file: file for the report as JSON; None = no file.
        spark: the session to use; None starts a small local one.
        echo: prints a line. The last line is ``N identical, M different, K not supported``.

    Raises:
        SourceError: a missing or invalid scenario file, no scenario, or an unknown operator.
        StorageError: ``json_file`` cannot be written.
    """
    if json_file is not None:
        require_writable(json_file)
    if granularity not in ("record", "run"):
        raise SourceError(f"expected the granularity 'record' or 'run', got {granularity!r}")
    unknown = sorted(set(operators or ()) - set(OPERATORS))
    if unknown:
        raise SourceError(
            f"expected operators among {', '.join(OPERATORS)}, got {unknown}; correct them"
        )
    found = list(read_scenarios(paths))
    chosen = [s for s in found if not operators or s.operator in operators]
    if not chosen:
        raise SourceError(
            f"expected scenarios{f' of {operators}' if operators else ''}, found none in "
            f"{[str(p) for p in paths]}; name the files or the directory that holds them"
        )
    results = {s: ScenarioOutcome(s, "not supported") for s in chosen}
    built = [s for s in chosen if supported(s) and _builds(s, results)]
    stores = [s for s in built if s.operator == "versioned_store"]
    others = [s for s in built if s.operator != "versioned_store"]
    jobs = [
        *versioned_stores(stores, granularity, results),
        *side_by_side(others, granularity, results),
    ]
    jobs.sort(key=lambda job: -job.cost)
    if jobs:
        with ThreadPoolExecutor(_THREADS) as pool:
            session = spark or _session()
            for _ in pool.map(lambda job: job.run(session), jobs):
                pass
    report = Report(list(results.values()))
    for line in report.lines():
        echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return report


def conformance(
    paths: Annotated[
        list[Path], typer.Argument(help="Scenario files, or directories of them.", exists=True)
    ],
    operator: Annotated[
        list[str] | None, typer.Option(help="Run only this operator's scenarios (repeatable).")
    ] = None,
    granularity: Annotated[
        str, typer.Option(help="record: each record is a run of its own; run: a run has many records.")
    ] = "record",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file as well.")
    ] = None,
) -> None:
    """Compare the operators with Kafka Streams on recorded scenarios."""
    try:
        report = run(paths, operator, cast(Granularity, granularity), json_file, echo=typer.echo)
    except SourceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if report.ok else 1)


def _builds(scenario: Scenario, results: Mapping[Scenario, ScenarioOutcome]) -> bool:
    """Returns whether the scenario can run; settles those that fail, or must fail, when built."""
    must_fail = scenario.error is not None and scenario.error["at"] == "build"
    try:
        store_of(scenario) if scenario.operator == "versioned_store" else nodes_of([layout(scenario)])
    except TopologyError as error:
        if not must_fail:
            settle(results[scenario], [f"  topology: expected none / got the error {error}"])
        else:
            settle(results[scenario], compare("entry", scenario.expected, []))
        return False
    if must_fail:
        wanted = scenario.error and scenario.error["message"]
        settle(results[scenario], [f"  topology: expected an error ({wanted}) / got none"])
    return not must_fail


def _session() -> SparkSession:
    conf = {
        # Many short queries make much short-lived garbage: a large young generation collects it.
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Xmn600m",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # Do not keep thousands of plans for the UI.
        "spark.sql.ui.retainedExecutions": "1",
        "spark.ui.retainedJobs": "1",
        "spark.ui.retainedStages": "1",
        "spark.ui.retainedTasks": "1",
    }
    return build_session("vt_dagster conformance", master="local[2]", conf=conf)


# Scenarios of the versioned store


NOT_PUT = -9223372036854775808
"""The answer to a refused put in scenarios."""


def store_of(scenario: Scenario) -> VersionedTable:
    """Returns the scenario's table; raises TopologyError if its settings are invalid."""
    segment = scenario.config.get("segment_interval")
    return source(
        VersionedTable,
        "table",
        history_retention=ms(scenario.config["history_retention"]),
        segment_interval=None if segment is None else ms(segment),
    )


def versioned_stores(
    scenarios: Sequence[Scenario], granularity: Granularity, results: Mapping[Scenario, ScenarioOutcome]
) -> list[Job]:
    """Returns a job that runs all store scenarios as partitions of one table.

    ``record``: every put and delete is a run, and every answer is compared. ``run``: the puts and
    deletes of a whole scenario are one run; compared are the refused puts, the puts that became the
    latest, the answers to the gets after the last put or delete, the final store and the metric.
    """
    if not scenarios:
        return []

    def job(spark: SparkSession) -> None:
        retention = {i: ms(s.config["history_retention"]) for i, s in enumerate(scenarios)}
        table = source(VersionedTable, "table", schema=with_index(), history_retention=retention)
        driver = TopologyTestDriver(table, spark=spark)
        runs = [StoreRun(i, s) for i, s in enumerate(scenarios)]
        if granularity == "record":
            while any(r.left for r in runs):
                _store_step(driver.store("table"), runs)
        else:
            _store_run(driver, runs)
        stores = by_scenario(driver.versions("table"))
        for r in runs:
            dropped = driver.metrics("table", r.number).get(Outcome.LATE, 0)
            settle(results[r.scenario], store_differences(r, granularity, stores[r.number], dropped))

    return [Job(max(len(s.records) for s in scenarios), job)]


def store_differences(
    run: StoreRun, granularity: Granularity, rows: Sequence[Entry], dropped: int | None
) -> list[str]:
    """Returns the differences in answers, in the store's rows and in the number of refused puts."""
    expected = run.scenario.expected
    if granularity == "run":
        answers = [_comparable(e, a) for e, a in zip(expected, run.answers, strict=False)]
        expected = [*answers, *expected[len(answers) :]]
    found = compare("answer", expected, run.answers)
    return found + compare_state(run.scenario, final_store(rows), dropped, run.failed_at)


class Store(Protocol):
    """The store that scenarios call: ``VersionedStore`` of the driver, or an equivalent on tables."""

    def put(self, key: Any, value: Any, timestamp: int, /) -> Any:
        """Stores a version."""
        ...

    def delete(self, key: Any, timestamp: int, /) -> Any:
        """Stores a tombstone."""
        ...

    def get(self, key: Any, as_of: int | None = None, /) -> Any:
        """Returns the row that is valid at a time; None = now."""
        ...

    def get_each(self, *keys: Any) -> Sequence[Entry | None]:
        """Returns the answers to many gets, given as pairs of key and time."""
        ...


class StoreRun:
    """The progress of a store scenario through its calls."""

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number, self.scenario = number, scenario
        self.answers: list[Any] = []
        self.failed_at: int | None = None
        self.stopped = False

    @property
    def left(self) -> Sequence[Mapping[str, Any]]:
        """The remaining calls."""
        return () if self.stopped else self.scenario.records[len(self.answers) :]

    def gets(self) -> list[Mapping[str, Any]]:
        """Returns the next consecutive gets; they change nothing, so they can be answered together."""
        found: list[Mapping[str, Any]] = []
        for record in self.left:
            if record["call"] != "get" or record["key"] is None:
                break
            found.append(record)
        return found

    def writes(self) -> list[Entry]:
        """Returns the puts and deletes as records, up to a call without a key, which fails."""
        calls = self.scenario.records
        stop = next((i for i, call in enumerate(calls) if call["key"] is None), len(calls))
        return [
            record_of(self.number, call) | {"index": i}
            for i, call in enumerate(calls[:stop])
            if call["call"] != "get"
        ]

    def answer_writes(self, latest: Mapping[int, bool]) -> None:
        """Notes the answers to all calls up to the last write, after a run with all writes.

        Args:
            latest: for each stored write, by number of the call: whether it was its key's latest.
        """
        end = max((record["index"] + 1 for record in self.writes()), default=0)
        for i, call in enumerate(self.scenario.records[:end]):
            valid_to = NOT_PUT if i not in latest else -1 if latest[i] else _OLDER
            self.answers.append({"valid_to": valid_to} if call["call"] == "put" else _NOT_RETURNED)

    def fail(self, store: Store) -> None:
        """Makes the next call if its key is null, which must be refused."""
        if not self.left or self.left[0]["key"] is not None:
            return
        call, key = self.left[0], (self.number, None)
        self.stopped = True
        try:
            if call["call"] == "put":
                store.put(key, call["value"], call["timestamp"])
            elif call["call"] == "delete":
                store.delete(key, call["timestamp"])
            else:
                store.get(key, call.get("as_of"))
        except ContractError:
            self.failed_at = len(self.answers)
        else:
            # Calls after one without a key are not recorded.
            self.answers.append("no error")


def _row_answer(row: Entry | None) -> Entry | None:
    if row is None:
        return None
    return {"value": row["value"], "timestamp": millis(row["valid_from"]), "valid_to": None}


def answer_rest(store: Store, runs: Sequence[StoreRun]) -> None:
    """Makes the calls that come after the last write."""
    while any(r.left for r in runs):
        _answer_gets(store, runs)
        for r in runs:
            r.fail(store)


def _answer_gets(store: Store, runs: Sequence[StoreRun]) -> None:
    gets = [(r, call) for r in runs for call in r.gets()]
    if gets:
        keys = [((r.number, call["key"]), call.get("as_of")) for r, call in gets]
        for (r, _), row in zip(gets, store.get_each(*keys), strict=True):
            r.answers.append(_row_answer(row))


def _store_step(store: VersionedStore, runs: Sequence[StoreRun]) -> None:
    """Makes the next gets of every scenario, then its next put or delete."""
    _answer_gets(store, runs)
    for r in runs:
        r.fail(store)
    writing = [(r, r.left[0]) for r in runs if r.left and r.left[0]["call"] != "get"]
    if not writing:
        return
    records = [record_of(r.number, call) | {"index": len(r.answers)} for r, call in writing]
    deletes = [i for i, (_, call) in enumerate(writing) if call["call"] == "delete"]
    found = store.find_each(*(records[i] for i in deletes)) if deletes else []
    removed = dict(zip(deletes, found, strict=True))
    for i, answer in enumerate(store.put_each(*records)):
        if i in removed:
            writing[i][0].answers.append(_row_answer(removed[i]))
        else:
            valid_to = -1 if answer is None else NOT_PUT if answer is REFUSED else millis(answer)
            writing[i][0].answers.append({"valid_to": valid_to})


_OLDER = "not the latest"
_NOT_RETURNED = "not returned"


def _store_run(driver: TopologyTestDriver, runs: Sequence[StoreRun]) -> None:
    """Makes every scenario's puts and deletes in one run, then the gets after them."""
    records = [record for r in runs for record in r.writes()]
    if records:
        driver.pipe("table", *records)
    rows = by_scenario(driver.read("table"))
    for r in runs:
        r.answer_writes({row["index"]: row["is_latest"] for row in rows[r.number]})
    answer_rest(driver.store("table"), runs)


def _comparable(expected: Any, answer: Any) -> Any:
    """Returns the part of an expected answer that is known after a run of many calls."""
    if answer == _NOT_RETURNED:
        return _NOT_RETURNED
    if expected is not None and expected["valid_to"] not in (None, -1, NOT_PUT):
        return {"valid_to": _OLDER}
    return expected
