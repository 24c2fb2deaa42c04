"""A model of all operators: record by record, without Spark.

The model follows only ``tests/conformance/FORMAT.md`` 4 and 7, and shares no code with the operators.
:func:`complete` fills in what a scenario expects. Limits in bytes are left out (:class:`NotCovered`).
"""

from __future__ import annotations

from typing import Any

from tests.core.reference.run import Refused, Run
from tests.core.reference.stores import Row, Store, VersionedStore
from tests.core.reference.suppress import NotCovered
from tests.core.reference.topology import Topology

__all__ = ["NotCovered", "complete"]

Entry = dict[str, Any]
OUTCOME = ("expected", "expected_error", "final_store_of", "final_store", "metrics", "by_design")


def complete(scenario: Entry) -> Entry:
    """The scenario with ``expected`` and the other fields of an outcome that apply."""
    given = {field: value for field, value in scenario.items() if field not in OUTCOME}
    run = Run()
    try:
        if scenario["operator"] == "versioned_store":
            return given | _calls(scenario, run)
        return given | _records(scenario, run)
    except Refused as error:
        return given | _refused(error, run, [])


def _records(scenario: Entry, run: Run) -> Entry:
    topology = Topology(run)
    topology.build(scenario["operator"], scenario["config"])
    try:
        topology.feed(scenario["records"])
    except Refused as error:
        return _refused(error, run, [e for e in run.emitted if e["trigger"] < run.trigger])
    return _done(run, run.emitted, *(topology.watched or ("", None)))


def _calls(scenario: Entry, run: Run) -> Entry:
    store = run.store(scenario["config"] | {"versioned": True})
    assert isinstance(store, VersionedStore)
    answers: list[Any] = []
    for run.trigger, call in enumerate(scenario["records"]):
        key = call["key"]
        if key is None:
            error = Refused("NullPointerException", "a store has no null key")
            return _refused(error, run, answers)
        if call["call"] == "put":
            answers.append({"valid_to": store.put(key, call["value"], call["timestamp"])})
        elif call["call"] == "delete":
            answers.append(_answer(store.delete(key, call["timestamp"])))
        else:
            answers.append(_answer(store.get(key, call.get("as_of"))))
    return _done(run, answers, "store", store)


def _answer(row: Row | None) -> Entry | None:
    return row and {"value": row.value, "timestamp": row.timestamp, "valid_to": None}


def _refused(error: Refused, run: Run, expected: list[Any]) -> Entry:
    at: Entry = {"at": "build"} if run.trigger < 0 else {"at": "process", "trigger": run.trigger}
    return {"expected": expected, "expected_error": {"type": error.kind, **at, "message": str(error)}}


def _done(run: Run, expected: list[Any], name: str, store: Store | None) -> Entry:
    kept = {} if store is None else {"final_store_of": name, "final_store": store.content()}
    return {"expected": expected, **kept, "metrics": {"dropped_records": run.dropped}}
