"""Scenarios of the versioned store: puts, deletes and gets, and the answer to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pyspark.sql import SparkSession

from vt_dagster.conformance.scenario import (
    Entry,
    Granularity,
    Job,
    Scenario,
    ScenarioOutcome,
    by_scenario,
    compare,
    compare_state,
    final_store,
    millis,
    ms,
    record_of,
    settle,
    source,
    with_index,
)
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.errors import ContractError
from vt_dagster.testing import REFUSED, TopologyTestDriver, VersionedStore
from vt_dagster.topology.model import VersionedTable

NOT_PUT = -9223372036854775808
"""What a scenario expects of a refused put."""


def store_of(scenario: Scenario) -> VersionedTable:
    """The scenario's own table, which raises a TopologyError where it has no meaning."""
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
    """All store scenarios as partitions of one table.

    ``record``: every put and delete is a run; every answer is compared. ``run``: the puts and
    deletes of a whole scenario are one run; compared are which puts were refused, which became the
    latest, the answers of the gets after the last put or delete, the final store and the metric.
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
    """What is otherwise than expected: answers, the store's rows, how many puts were refused."""
    expected = run.scenario.expected
    if granularity == "run":
        told = [_told(e, a) for e, a in zip(expected, run.answers, strict=False)]
        expected = [*told, *expected[len(told) :]]
    found = compare("answer", expected, run.answers)
    return found + compare_state(run.scenario, final_store(rows), dropped, run.failed_at)


class Store(Protocol):
    """What scenarios call: ``VersionedStore`` of the driver, or tables that stand for it."""

    def put(self, key: Any, value: Any, timestamp: int, /) -> Any:
        """Stores a version."""
        ...

    def delete(self, key: Any, timestamp: int, /) -> Any:
        """Stores a tombstone."""
        ...

    def get(self, key: Any, as_of: int | None = None, /) -> Any:
        """The row that was valid then; None = now."""
        ...

    def get_each(self, *keys: Any) -> Sequence[Entry | None]:
        """The answers to many gets, given as a key and a time each."""
        ...


class StoreRun:
    """A store scenario on its way through the calls."""

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number, self.scenario = number, scenario
        self.answers: list[Any] = []
        self.failed_at: int | None = None
        self.stopped = False

    @property
    def left(self) -> Sequence[Mapping[str, Any]]:
        """The calls that have not been made."""
        return () if self.stopped else self.scenario.records[len(self.answers) :]

    def gets(self) -> list[Mapping[str, Any]]:
        """The gets that come next; they change nothing, so they can be answered together."""
        found: list[Mapping[str, Any]] = []
        for record in self.left:
            if record["call"] != "get" or record["key"] is None:
                break
            found.append(record)
        return found

    def writes(self) -> list[Entry]:
        """Its puts and deletes as records, up to a call without a key, which comes to nothing."""
        calls = self.scenario.records
        stop = next((i for i, call in enumerate(calls) if call["key"] is None), len(calls))
        return [
            record_of(self.number, call) | {"index": i}
            for i, call in enumerate(calls[:stop])
            if call["call"] != "get"
        ]

    def tell(self, latest: Mapping[int, bool]) -> None:
        """Answers all calls up to its last write, after a run that took all writes.

        Args:
            latest: of each write that was stored, whether it was its key's latest.
        """
        end = max((record["index"] + 1 for record in self.writes()), default=0)
        for i, call in enumerate(self.scenario.records[:end]):
            told = NOT_PUT if i not in latest else -1 if latest[i] else _OLDER
            self.answers.append({"valid_to": told} if call["call"] == "put" else _NOT_TOLD)

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
            # What comes after a call without a key has no meaning.
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
    asked = [(r, call) for r in runs for call in r.gets()]
    if asked:
        keys = [((r.number, call["key"]), call.get("as_of")) for r, call in asked]
        for (r, _), row in zip(asked, store.get_each(*keys), strict=True):
            r.answers.append(_row_answer(row))


def _store_step(store: VersionedStore, runs: Sequence[StoreRun]) -> None:
    """The next gets of every scenario, then its next put or delete."""
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
_NOT_TOLD = "not told"


def _store_run(driver: TopologyTestDriver, runs: Sequence[StoreRun]) -> None:
    """Every scenario's puts and deletes in one run, then the gets after them."""
    records = [record for r in runs for record in r.writes()]
    if records:
        driver.pipe("table", *records)
    rows = by_scenario(driver.read("table"))
    for r in runs:
        r.tell({row["index"]: row["is_latest"] for row in rows[r.number]})
    answer_rest(driver.store("table"), runs)


def _told(expected: Any, answer: Any) -> Any:
    """As much of an expected answer as a run of many calls can tell."""
    if answer == _NOT_TOLD:
        return _NOT_TOLD
    if expected is not None and expected["valid_to"] not in (None, -1, NOT_PUT):
        return {"valid_to": _OLDER}
    return expected
