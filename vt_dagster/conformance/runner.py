"""Reads scenarios, runs those of each operator, and prints the comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pyspark.sql import SparkSession

from vt_dagster.conformance.scenario import (
    OPERATORS,
    Granularity,
    Job,
    Report,
    Scenario,
    ScenarioOutcome,
    compare,
    read_scenarios,
    settle,
)
from vt_dagster.conformance.side_by_side import side_by_side
from vt_dagster.conformance.steps import layout, nodes_of, supported
from vt_dagster.conformance.store_scenarios import store_of, versioned_stores
from vt_dagster.errors import SourceError, TopologyError
from vt_dagster.spark.session import build_session

_THREADS = 2
"""Two, since a run mostly waits for Spark's planner."""


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
    """
    if granularity not in ("record", "run"):
        raise SourceError(f"expected the granularity 'record' or 'run', got {granularity!r}")
    unknown = sorted(set(operators or ()) - set(OPERATORS))
    if unknown:
        raise SourceError(f"expected operators out of {', '.join(OPERATORS)}, got {unknown}")
    found = list(read_scenarios(paths))
    chosen = [s for s in found if not operators or s.operator in operators]
    if not chosen:
        raise SourceError(
            f"expected scenarios{f' of {operators}' if operators else ''}, found none in "
            f"{[str(p) for p in paths]}; name the files or the directory that holds them"
        )
    results = {s: ScenarioOutcome(s, "not supported") for s in chosen}
    built = [s for s in chosen if supported(s) and _builds(s, results)]
    jobs: list[Job] = []
    for operator in OPERATORS:
        plan = versioned_stores if operator == "versioned_store" else side_by_side
        jobs += plan([s for s in built if s.operator == operator], granularity, results)
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
        str, typer.Option(help="One run a 'record', or a 'run' as long as is promised.")
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
        message = f"  topology: expected an error ({_error(scenario)}) / got none"
        settle(results[scenario], [message])
    return not must_fail


def _error(scenario: Scenario) -> str:
    return str(scenario.error and scenario.error["message"])


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
