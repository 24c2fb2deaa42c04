"""``vt-dagster check``: runs asset checks in CI without a daemon; reports a table and JUnit XML.

Runs all checks of the code location, the user's own too, on committed data; materializes nothing. With
``DAGSTER_HOME`` set, the results are also in the UI.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import dagster as dg
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.errors import DefinitionsError

Verdict = Literal["passed", "warned", "failed", "broken"]
_COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "broken": "red"}
_WORKSPACE = "workspace.yaml"


@dataclass(frozen=True)
class CheckResult:
    """The result of one asset check.

    ``failed`` and ``broken`` (the check raised, or did not run) fail a CI job; ``warned`` (failed with
    severity WARN) does not.
    """

    asset: str
    name: str
    verdict: Verdict
    said: str = ""
    offending: int | None = None
    sample: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def stops(self) -> bool:
        """Whether the result fails a CI job."""
        return self.verdict in ("failed", "broken")


Selection = Annotated[
    str,
    typer.Argument(help='Assets, as in Dagster: prices, "prices+", "group:published"; "*" is all.'),
]
DefinitionsFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="Python file with the Definitions.")
]
DefinitionsModule = Annotated[
    str | None, typer.Option("--module", "-m", help="Python module with the Definitions.")
]


def check(
    selection: Selection = "*",
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    junit: Annotated[Path | None, typer.Option(help="Write the results as JUnit XML.")] = None,
) -> None:
    """Run asset checks and exit with 1 if one fails with severity ERROR.

    Without --file and --module, uses the code locations of ./workspace.yaml.
    """
    started = time.monotonic()
    results = [
        result for defs in load_definitions(file, module) for result in run_checks(defs, selection)
    ]
    if not results:
        raise DefinitionsError(
            f"expected assets with checks in the selection {selection!r}, found none; give the name of "
            'an asset, "group:NAME", or "*" for all'
        )
    _print(results, Console())
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        write_junit(results, junit, time.monotonic() - started)
    raise typer.Exit(1 if any(result.stops for result in results) else 0)


# ------------------------------------------------------------------------------- the definitions


def load_definitions(file: Path | None, module: str | None) -> list[dg.Definitions]:
    """Returns the Definitions of a file, of a module, or of each code location of ``./workspace.yaml``.

    Raises:
        DefinitionsError: a file, module or workspace is missing, or does not have exactly one
            Definitions object.
    """
    sys.path.insert(0, str(Path.cwd()))
    if file is not None:
        return [_of_file(file)]
    if module is not None:
        return [_of_module(module)]
    workspace = Path(_WORKSPACE)
    if not workspace.is_file():
        raise DefinitionsError(
            f"expected Definitions to check, found no {_WORKSPACE} in {Path.cwd()}; name them: "
            "--file prices.py or --module my_project.definitions"
        )
    content = yaml.safe_load(workspace.read_text(encoding="utf-8")) or {}
    return [_of_location(location) for location in content.get("load_from") or []]


def _of_location(location: dict[str, Any]) -> dg.Definitions:
    (kind, about), *_ = location.items()
    if kind == "python_module":
        return _of_module(about if isinstance(about, str) else about["module_name"])
    if kind == "python_file":
        return _of_file(Path(about if isinstance(about, str) else about["relative_path"]))
    raise DefinitionsError(
        f"expected python_module or python_file in {_WORKSPACE}, got {kind!r}; name the Definitions "
        "with --file or --module instead"
    )


def _of_file(file: Path) -> dg.Definitions:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise DefinitionsError(f"expected a Python file with Definitions, got {file}; correct the path")
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    spec.loader.exec_module(found)
    return _definitions_in(found, str(file))


def _of_module(name: str) -> dg.Definitions:
    return _definitions_in(module_of(name), name)


def module_of(name: str) -> Any:
    """Imports a module of the user, also from the working directory.

    Raises:
        DefinitionsError: there is no such module; what fails within it is raised as it is.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise DefinitionsError(
            f"expected a module {name!r}, found none; correct the name, or run this in the directory "
            "that contains it"
        ) from None


def _definitions_in(module: Any, where: str) -> dg.Definitions:
    lazy: Any = type(dg.definitions(lambda: dg.Definitions()))
    found = [value for value in vars(module).values() if isinstance(value, dg.Definitions | lazy)]
    if len(found) != 1:
        raise DefinitionsError(
            f"expected one Definitions object in {where}, found {len(found)}; put one there, for "
            "example defs = build_definitions(...), and merge several with dagster.Definitions.merge"
        )
    one: dg.Definitions | Callable[[], dg.Definitions] = found[0]
    return one if isinstance(one, dg.Definitions) else one()


# ------------------------------------------------------------------------------------ the checks


def run_checks(defs: dg.Definitions, selection: str = "*") -> list[CheckResult]:
    """Runs the checks of the selected assets in this process, ordered by asset and name.

    Results are recorded in the Dagster instance of ``DAGSTER_HOME`` if that is set.

    Raises:
        DefinitionsError: the selection is invalid.
    """
    graph = defs.resolve_asset_graph()
    assets = selected(graph, selection)
    chosen = [key for key in graph.asset_check_keys if key.asset_key in assets]
    if not chosen:
        return []
    job = dg.define_asset_job("vt_dagster_check", dg.AssetSelection.checks(*chosen))
    every = dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
    with instance_of() as instance:
        result = execute_quietly(every.resolve_job_def(job.name), instance)
    done = {(e.asset_key, e.check_name): e for e in result.get_asset_check_evaluations()}
    errors = dict(errors_of(result))
    return [
        _result(
            done.get((key.asset_key, key.name)),
            graph.get_check_spec(key),
            errors.get(graph.assets_def_for_key(key).node_def.name, "it did not run"),
        )
        for key in sorted(chosen, key=lambda key: (key.asset_key.to_user_string(), key.name))
    ]


def execute_quietly(
    job: dg.JobDefinition, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey] | None = None
) -> dg.ExecuteInProcessResult:
    """Runs a job in this process without Dagster's console log; the caller reports its errors.

    Args:
        keys: the assets to materialize; None = all assets of the job.
    """
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    config = quiet if "console" in job.loggers else {}  # Definitions may have other loggers
    return job.execute_in_process(
        instance=instance, run_config=config, raise_on_error=False, asset_selection=keys
    )


def selected(graph: Any, selection: str) -> set[dg.AssetKey]:
    """Returns the assets of a selection in Dagster's syntax.

    Raises:
        DefinitionsError: the selection is invalid.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dagster warns of a beta parameter that it passes itself
            return set(dg.AssetSelection.from_string(selection).resolve(graph))
    except dg.DagsterError:
        raise DefinitionsError(
            f"expected a selection of assets in Dagster's syntax, got {selection!r}; choose from "
            f"{sorted(key.to_user_string() for key in graph.get_all_asset_keys())}"
        ) from None


@contextmanager
def instance_of() -> Iterator[dg.DagsterInstance]:
    """Yields the Dagster instance of ``DAGSTER_HOME``; an ephemeral one if that is not set."""
    with warnings.catch_warnings():
        # With handlers in dagster.yaml, Dagster warns in each run that they are beta.
        warnings.filterwarnings("ignore", "Handling yaml-defined logging configuration")
        set_up = os.environ.get("DAGSTER_HOME")
        with dg.DagsterInstance.get() if set_up else dg.DagsterInstance.ephemeral() as instance:
            yield instance


def _result(
    evaluation: dg.AssetCheckEvaluation | None, spec: dg.AssetCheckSpec, error: str
) -> CheckResult:
    asset = spec.asset_key.to_user_string()
    if evaluation is None:
        return CheckResult(asset, spec.name, "broken", error)
    if evaluation.passed:
        return CheckResult(asset, spec.name, "passed")
    values: dict[str, Any] = {name: value.value for name, value in evaluation.metadata.items()}
    tables = [v for v in evaluation.metadata.values() if isinstance(v, dg.TableMetadataValue)]
    sample = [dict(record.data) for table in tables[:1] for record in table.records]
    verdict: Verdict = "warned" if evaluation.severity == dg.AssetCheckSeverity.WARN else "failed"
    return CheckResult(
        asset,
        spec.name,
        verdict,
        evaluation.description or f"expected that {spec.description or 'it passes'}",
        values.get("offending_rows"),
        sample,
    )


def errors_of(result: dg.ExecuteInProcessResult) -> Iterator[tuple[str, str]]:
    """Yields the name of each failed step and its root error, on one line."""
    for event in result.all_events:
        if event.is_step_failure and event.step_failure_data.error is not None:
            error = event.step_failure_data.error
            while error.cause is not None:
                error = error.cause
            yield event.step_key or "", " ".join(error.message.split())


# ------------------------------------------------------------------------------------ the report


def _print(results: list[CheckResult], console: Console) -> None:
    table = TextTable(title=f"{len(results)} asset checks")
    for column in ("asset", "check", "result"):
        table.add_column(column)
    table.add_column("offending rows", justify="right")
    for one in results:
        colour = _COLOURS[one.verdict]
        count = "" if one.offending is None else f"{one.offending:,}"
        table.add_row(Text(one.asset), Text(one.name), Text(one.verdict, colour), Text(count))
    console.print(table)
    for one in results:
        if one.said:
            console.print(f"{one.asset}: {one.name}: {one.said}", markup=False, highlight=False)
        if one.sample:
            rows = TextTable(*map(escape, one.sample[0]))
            for row in one.sample:
                rows.add_row(*(Text(str(value)) for value in row.values()))
            console.print(rows)


def write_junit(results: list[CheckResult], path: Path, seconds: float) -> None:
    """Writes results as JUnit XML: a suite for each asset, a case for each check."""
    root = ElementTree.Element("testsuites", {"time": f"{seconds:.3f}", **_totals(results)})
    for asset in dict.fromkeys(one.asset for one in results):
        of_asset = [one for one in results if one.asset == asset]
        suite = ElementTree.SubElement(root, "testsuite", {"name": asset, **_totals(of_asset)})
        for one in of_asset:
            case = ElementTree.SubElement(suite, "testcase", classname=asset, name=one.name)
            text = "\n".join([one.said, *(str(row) for row in one.sample)])
            if one.verdict == "failed":
                found = f"{one.offending} offending rows" if one.offending is not None else one.said
                ElementTree.SubElement(case, "failure", message=found).text = text
            elif one.verdict == "broken":
                ElementTree.SubElement(case, "error", message=one.said).text = text
            elif one.verdict == "warned":
                ElementTree.SubElement(case, "system-out").text = f"WARN: {text}"
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _totals(results: list[CheckResult]) -> dict[str, str]:
    return {
        "tests": str(len(results)),
        "failures": str(sum(one.verdict == "failed" for one in results)),
        "errors": str(sum(one.verdict == "broken" for one in results)),
    }
