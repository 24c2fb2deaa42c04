"""Reads scenarios, runs those of each operator, prints how they compare."""

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
"""A run is mostly waiting for Spark's planner."""


def run(
    paths: Iterable[Path | str],
    operators: Sequence[str] | None = None,
    granularity: Granularity = "record",
    json_file: Path | None = None,
    spark: SparkSession | None = None,
    echo: Callable[[str], Any] = print,
) -> Report:
    """Runs the scenarios of files and directories and prints how they compare.

    At granularity ``record`` every record that can trigger output is a run of its own, and output
    is compared entry by entry, trigger and order included. At granularity ``run`` a run takes as
    many records as may be taken at once without changing results: see ``versioned_stores`` and
    ``side_by_side`` for what exactly is compared.

    Args:
        paths: scenario files, or directories that are searched for ``*.json``.
        operators: run only these; None = all. Limits in bytes are not supported.
        json_file: where to write the report as JSON, if anywhere.
        spark: the session to use; None starts a small local one.
        echo: prints a line. The last one is ``N identical, M different, K not supported``.

    Raises:
        SourceError: a file that is not there or not a scenario file, no scenario at all, or an
            operator that the format does not have.
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
    """Whether the scenario goes on to run; one that must be refused when it is built is done."""
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
        # Many short queries leave much garbage that nobody needs any more.
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Xmn600m",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # Nobody looks back at thousands of plans.
        "spark.sql.ui.retainedExecutions": "1",
        "spark.ui.retainedJobs": "1",
        "spark.ui.retainedStages": "1",
        "spark.ui.retainedTasks": "1",
    }
    return build_session("vt_dagster conformance", master="local[2]", conf=conf)
