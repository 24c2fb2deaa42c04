"""``vt-dagster check`` and ``run``: checks and materializations in this process, without a daemon.

``check`` runs all checks of the code location, the user's own too, on committed data; it materializes
nothing, and reports a table and JUnit XML. ``run`` materializes assets and prints a summary. Both are
recorded in the Dagster instance of ``DAGSTER_HOME``, like those of ``dg launch``; their logs go to that
instance and to the handlers of its ``dagster.yaml``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import dagster as dg
import pyarrow.compute as pc
import typer
import yaml
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.cli.lookup import shown
from vt_dagster.columns import (
    CAUSE,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    RESERVED,
    REVISION,
    TIMESTAMP,
)
from vt_dagster.errors import DefinitionsError, TopologyError, VtDagsterError, counted
from vt_dagster.orchestration.metadata import records_of
from vt_dagster.orchestration.resources import declared_nodes, warehouse_key
from vt_dagster.orchestration.sensors import partitioned
from vt_dagster.runs.audit import NO_TABLES
from vt_dagster.storage.delta import place_of, require_writable
from vt_dagster.storage.read import read
from vt_dagster.storage.values import texts
from vt_dagster.topology.model import Stream

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
    text: str = ""
    offending: int | None = None
    sample: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    looked_at: str = ""

    @property
    def stops(self) -> bool:
        """Whether the result fails a CI job."""
        return self.verdict in ("failed", "broken")


Selection = Annotated[
    str, typer.Argument(help='Assets, as in Dagster: prices, "prices+", "group:published"; "*" is all.')
]
DefinitionsFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="Python file with the Definitions; or a defs.yaml or a folder of a dg project.",
    ),
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

    Without --file and --module, uses ./workspace.yaml, or the dg project in the working directory.
    """
    if junit is not None:
        require_writable(junit)
    started = time.monotonic()
    locations = load_locations(file, module)
    results = [result for one in locations for result in run_checks(one.defs, selection)]
    if not results:
        raise DefinitionsError(
            f"expected assets with checks in the selection {selection!r}, found none; give the name of "
            'an asset, "group:NAME", or "*" for all'
        )
    _print(results, Console())
    if junit is not None:
        write_junit(results, junit, time.monotonic() - started)
    raise typer.Exit(1 if any(result.stops for result in results) else 0)


# ------------------------------------------------------------------------------- the definitions


@dataclass(frozen=True)
class Location:
    """The declarations in a file, a module or a code location.

    Args:
        defs: its Definitions.
        every: those of the whole project, of which ``defs`` may be a part.
        variables: of a module: its streams, tables and assets that are variables.
    """

    defs: dg.Definitions
    every: dg.Definitions
    variables: Sequence[Any] = ()


@dataclass(frozen=True)
class Topology:
    """The streams and tables of one warehouse, declared in Python or in YAML.

    Args:
        where: the file, module or workspace, for messages.
        options: the command-line options that name it.
        nodes: by name; of a part of a project, those of the whole project.
        chosen: of a part of a project: the names of its assets in the warehouse; None = all.
        assets: all assets, also those of the user.
    """

    where: str
    options: Sequence[str]
    warehouse: str
    nodes: Mapping[str, Stream]
    chosen: Collection[str] | None
    assets: Sequence[dg.AssetsDefinition]

    def node(self, name: str) -> Stream:
        """Returns a stream or table.

        Raises:
            TopologyError: none has the name.
        """
        if name not in self.nodes:
            raise TopologyError(
                f"expected one of {sorted(self.nodes)} in {self.where}, got {name!r}; choose one of "
                "them, or declare it there: with an asset, or as a variable of the module"
            )
        return self.nodes[name]


def load_topology(file: Path | None, module: str | None, warehouse: str | None) -> Topology:
    """Returns the streams and tables of a file, of a module, or of all code locations of
    ``./workspace.yaml``: those of its assets, and those that are variables of the file or module.

    Args:
        warehouse: None = that of the definitions, or ``data/warehouse`` if they have none.

    Raises:
        DefinitionsError: as :func:`load_locations`; or the definitions have several warehouses.
        TopologyError: there are no streams and tables.
    """
    locations = load_locations(file, module, variables=True)
    where = (
        str(file) if file else module or (_WORKSPACE if Path(_WORKSPACE).is_file() else str(Path.cwd()))
    )
    declared = [
        (node, _warehouse_of(one.every, prefix))
        for one in locations
        for node, prefix in declared_nodes(one.every)
    ]
    places = {place for _, place in declared if place is not None}
    given = None if warehouse is None else place_of(warehouse)
    if given in places:
        declared = [(node, place) for node, place in declared if place in (given, None)]
    elif len(places) > 1:
        raise DefinitionsError(
            f"expected the tables of one warehouse in {where}, got those of {sorted(places)}; choose "
            "one of them with --warehouse"
        )
    variables = [value for one in locations for value in one.variables]
    streams = [value for value in variables if isinstance(value, Stream)]
    nodes = {node.name: node for node in [*(node for node, _ in declared), *streams]}
    if not nodes:
        raise TopologyError(
            f"expected streams and tables in {where}, found none; name the module or the file that "
            "declares them, with --module or --file"
        )
    graphs = [graph_of(one.every) for one in locations]
    declared_assets = [one for graph in graphs for one in graph.assets_defs]
    parts = [one.defs for one in locations if one.defs is not one.every]
    chosen = {"/".join(node.path) for part in parts for node, _ in declared_nodes(part)}
    return Topology(
        where,
        ["--file", str(file)] if file else ["--module", module] if module else [],
        warehouse or next(iter(places), WAREHOUSE),
        nodes,
        chosen if parts else None,
        [*declared_assets, *(one for one in variables if isinstance(one, dg.AssetsDefinition))],
    )


def _warehouse_of(defs: dg.Definitions, prefix: str) -> str | None:
    """Returns the warehouse of the resources of a prefix; None = there is none."""
    key = warehouse_key(prefix)
    if key not in (defs.resources or {}):
        return None
    with accepted(), dg.build_resources({key: (defs.resources or {})[key]}) as resources:
        # Dagster has resolved environment variables in the path.
        return place_of(getattr(resources, key).path)


@contextmanager
def accepted() -> Iterator[None]:
    """Turns an error of Dagster about resources or run config into one without a traceback.

    Raises:
        DefinitionsError: Dagster does not accept them: for example, an environment variable is not set.
    """
    try:
        yield
    except dg.DagsterError as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, VtDagsterError):
            raise root from None
        text = " ".join(str(root).partition("\n\nStack Trace:")[0].split())
        raise DefinitionsError(
            f"expected resources and run config that Dagster accepts, got: {text}; correct them"
        ) from error


def graph_of(defs: dg.Definitions) -> Any:
    """Returns the graph of the assets.

    Raises:
        DefinitionsError: Dagster does not accept the definitions: for example, a resource is missing.
    """
    with accepted():
        return defs.resolve_asset_graph()


def load_locations(file: Path | None, module: str | None, variables: bool = False) -> list[Location]:
    """Returns what a file, a module, or each code location of ``./workspace.yaml`` declares; without
    that file, what the dg project in the working directory declares.

    Args:
        variables: whether a file or module may declare streams and tables as variables only.

    Raises:
        DefinitionsError: a file, module or workspace is missing, or does not have exactly one
            Definitions object.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    # Dagster warns of a beta parameter that it passes itself, to each asset with a check of its own.
    warnings.filterwarnings("ignore", "Parameter `execution_type` of function")
    try:
        return [*_locations(file, module, variables)]
    except Exception as error:  # Dagster wraps errors of components in its own
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, VtDagsterError | yaml.YAMLError):
            if isinstance(cause, ValidationError) and re.search(r"\.ya?ml:\d+`", str(cause)):
                break
            cause = cause.__cause__
        if cause is None:
            raise
        if isinstance(cause, VtDagsterError):
            raise cause from None
        said = re.sub(r"\n *For further information visit .*", "", str(cause))
        raise DefinitionsError(f"expected a valid YAML file, got: {said}") from None


def _locations(file: Path | None, module: str | None, variables: bool) -> Iterator[Location]:
    if file is not None and module is not None:
        raise DefinitionsError(
            "expected either --file or --module, got both; drop one of them, or import the other's "
            "definitions there"
        )
    if file is not None:
        yield _of_file(file, variables)
        return
    if module is not None:
        yield _of_module(module, variables)
        return
    workspace = Path(_WORKSPACE)
    if not workspace.is_file() and _is_project(Path.cwd()):
        yield _of_project(Path.cwd())
        return
    if not workspace.is_file():
        raise DefinitionsError(
            f"expected Definitions to check, found no {_WORKSPACE} in {Path.cwd()}; name them: "
            "--file prices.py or --module my_project.definitions"
        )
    content = yaml.safe_load(workspace.read_text(encoding="utf-8")) or {}
    yield from map(_of_location, content.get("load_from") or [])


def _of_location(location: dict[str, Any]) -> Location:
    (kind, about), *_ = location.items()
    if kind == "python_module":
        return _of_module(about if isinstance(about, str) else about["module_name"])
    if kind == "python_file":
        return _of_file(Path(about if isinstance(about, str) else about["relative_path"]))
    raise DefinitionsError(
        f"expected python_module or python_file in {_WORKSPACE}, got {kind!r}; name the Definitions "
        "with --file or --module instead"
    )


def _of_file(file: Path, variables: bool = False) -> Location:
    if file.is_dir() or file.suffix in (".yaml", ".yml"):
        return _of_project(file)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise DefinitionsError(
            f"expected a Python file with Definitions, got {file}; correct the path, or name a "
            "defs.yaml or a folder of a dg project"
        )
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    spec.loader.exec_module(found)
    return _in_module(found, str(file), variables)


def _of_project(place: Path) -> Location:
    """Returns the definitions of a ``defs.yaml``, or of a folder: within the project's ``defs`` those
    of the folder, with the resources and the executor of the project; else those of the project."""
    folder = (place if place.is_dir() else place.parent).resolve()
    root = next(filter(_is_project, (folder, *folder.parents)), None)
    if not place.exists() or root is None:
        raise DefinitionsError(
            f"expected a defs.yaml or a folder of a dg project, which has a pyproject.toml with "
            f"[tool.dg.project], got {place}; correct the path, or name Definitions in Python"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    tree = dg.ComponentTree.for_project(folder)
    if Path(next(iter(tree.defs_module.__path__))).resolve() not in folder.parents:
        whole = f"{tree.defs_module.__name__.partition('.')[0]}.definitions"  # the module that dg loads
        if importlib.util.find_spec(whole) is not None:
            return _of_module(whole)
        defs = tree.build_defs()
        return Location(defs, defs)
    every, own = tree.build_defs(), tree.build_defs_at_path(folder)
    missing = {
        key: one for key, one in (every.resources or {}).items() if key not in (own.resources or {})
    }
    executor = every.executor if own.executor is None else None
    rest = dg.Definitions(resources=missing, executor=executor)
    return Location(dg.Definitions.merge(own, rest), every)


def _is_project(folder: Path) -> bool:
    settings = folder / "pyproject.toml"
    if (folder / "dg.toml").is_file():
        return True
    return settings.is_file() and "[tool.dg" in settings.read_text(encoding="utf-8")


def _of_module(name: str, variables: bool = False) -> Location:
    try:
        if name.startswith(".") or not name:  # import_module rejects relative names with other errors
            raise ModuleNotFoundError(name=name)
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an error inside the module
        raise DefinitionsError(
            f"expected a module {name!r}, found none; correct the name, or run this in the directory "
            "that contains it"
        ) from None
    return _in_module(module, name, variables)


def _in_module(module: Any, where: str, variables: bool) -> Location:
    lazy: Any = type(dg.definitions(lambda: dg.Definitions()))
    found = [value for value in vars(module).values() if isinstance(value, dg.Definitions | lazy)]
    if len(found) != 1 and not variables:
        raise DefinitionsError(
            f"expected one Definitions object in {where}, found {len(found)}; put one there, for "
            "example defs = build_definitions(...), and merge several with dagster.Definitions.merge"
        )
    one: Any = found[0] if len(found) == 1 else dg.Definitions()
    defs: dg.Definitions = one if isinstance(one, dg.Definitions) else one()
    assets = [one for one in vars(module).values() if isinstance(one, Stream | dg.AssetsDefinition)]
    return Location(defs, defs, assets if variables else ())


# ------------------------------------------------------------------------------------ the checks


def run_checks(defs: dg.Definitions, selection: str = "*") -> list[CheckResult]:
    """Runs the checks of the selected assets in this process, ordered by asset and name.

    Results are recorded in the Dagster instance of ``DAGSTER_HOME`` if that is set.

    Raises:
        DefinitionsError: the selection is invalid.
    """
    graph = graph_of(defs)
    assets = selected(graph, selection)
    chosen = [key for key in graph.asset_check_keys if key.asset_key in assets]
    if not chosen:
        return []
    job = _job("vt_dagster_check", defs, dg.AssetSelection.checks(*chosen))
    with instance_of() as instance:
        result = execute_quietly(job, instance)
    done = {(e.asset_key, e.check_name): e for e in result.get_asset_check_evaluations()}
    errors = dict(errors_of(result))
    return [
        _result(
            done.get((key.asset_key, key.name)),
            graph.get_check_spec(key),
            errors.get(graph.assets_def_for_key(key).node_def.name, errors.get("", "it did not run")),
        )
        for key in sorted(chosen, key=lambda key: (key.asset_key.to_user_string(), key.name))
    ]


def _job(name: str, defs: dg.Definitions, selection: dg.AssetSelection) -> dg.JobDefinition:
    """Returns a job of a selection in some definitions."""
    job = dg.define_asset_job(name, selection)
    return dg.Definitions.merge(defs, dg.Definitions(jobs=[job])).resolve_job_def(name)


def execute_quietly(
    job: dg.JobDefinition, instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey] | None = None
) -> dg.ExecuteInProcessResult:
    """Runs a job in this process without Dagster's console log; the caller reports its errors.

    Args:
        keys: the assets to materialize; None = all assets of the job.
    """
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    config = quiet if "console" in job.loggers else {}  # Definitions may have other loggers
    with accepted():
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
    """Yields the Dagster instance of ``DAGSTER_HOME``; an ephemeral one if that is not set.

    Raises:
        DefinitionsError: the directory or its dagster.yaml is not valid.
    """
    with warnings.catch_warnings():
        # With handlers in dagster.yaml, Dagster warns in each run that they are beta.
        warnings.filterwarnings("ignore", "Handling yaml-defined logging configuration")
        home = os.environ.get("DAGSTER_HOME")
        try:
            found = dg.DagsterInstance.get() if home else dg.DagsterInstance.ephemeral()
        except Exception as error:  # Dagster's, YAML's, or that of a database
            raise DefinitionsError(
                f"DAGSTER_HOME: expected a Dagster instance in {home}, got: "
                f"{' '.join(str(error).split())}; correct it, or unset the variable"
            ) from error
        with found as instance:
            yield instance


def _result(
    evaluation: dg.AssetCheckEvaluation | None, spec: dg.AssetCheckSpec, error: str
) -> CheckResult:
    asset = spec.asset_key.to_user_string()
    if evaluation is None:
        return CheckResult(asset, spec.name, "broken", error)
    values: dict[str, Any] = {name: value.value for name, value in evaluation.metadata.items()}
    if evaluation.passed:
        return CheckResult(asset, spec.name, "passed", looked_at=str(values.get("looked_at", "")))
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
    """Yields the name of each failed step and its root error, on one line; of a run without a step,
    whose resources failed, an empty name."""
    for event in result.all_events:
        error = None
        if event.is_step_failure:
            error = event.step_failure_data.error
        elif event.is_run_failure and event.job_failure_data.first_step_failure_event is None:
            error = event.job_failure_data.error
        if error is not None:
            while error.cause is not None:
                error = error.cause
            yield event.step_key or "", " ".join(error.message.split())


# ------------------------------------------------------------------------------------ the report


def _print(results: list[CheckResult], console: Console) -> None:
    count = Column("offending rows", justify="right")
    table = TextTable("asset", "check", "result", count, title=counted(len(results), "asset check"))
    for one in results:
        colour = _COLOURS[one.verdict]
        offending = "" if one.offending is None else f"{one.offending:,}"
        table.add_row(Text(one.asset), Text(one.name), Text(one.verdict, colour), Text(offending))
    console.print(table)
    # It may be the wrong warehouse, or one that is relative to another working directory.
    for asset, at in dict.fromkeys((one.asset, one.looked_at) for one in results):
        if at.startswith(NO_TABLES):
            console.print(f"{asset}: its checks looked at {at}", markup=False, highlight=False)
    for one in results:
        if one.text:
            console.print(f"{one.asset}: {one.name}: {one.text}", markup=False, highlight=False)
        if one.sample:
            rows = TextTable(*map(_whole, one.sample[0]))
            for row in one.sample:
                rows.add_row(*(Text(str(value)) for value in row.values()))
            console.print(rows)


def _whole(name: str) -> Column:
    """Returns a column whose name and values are broken into lines where they are too long, not cut."""
    return Column(escape(name), overflow="fold")


def write_junit(results: list[CheckResult], path: Path, seconds: float) -> None:
    """Writes results as JUnit XML: a suite for each asset, a case for each check."""
    root = ElementTree.Element("testsuites", {"time": f"{seconds:.3f}", **_totals(results)})
    for asset in dict.fromkeys(one.asset for one in results):
        of_asset = [one for one in results if one.asset == asset]
        suite = ElementTree.SubElement(root, "testsuite", {"name": asset, **_totals(of_asset)})
        for one in of_asset:
            case = ElementTree.SubElement(suite, "testcase", classname=asset, name=one.name)
            text = "\n".join([one.text, *(str(row) for row in one.sample)])
            if one.verdict == "failed":
                found = one.text if one.offending is None else counted(one.offending, "offending row")
                ElementTree.SubElement(case, "failure", message=found).text = text
            elif one.verdict == "broken":
                ElementTree.SubElement(case, "error", message=one.text).text = text
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


# Run


_OURS = {*RESERVED, CAUSE, REVISION, TIMESTAMP}
"""The columns of the library: the output leaves them out."""
_READ = 1_000_000
"""New rows of a log with more rows are not shown: that would read the whole log."""
WAREHOUSE = "data/warehouse"
"""The default warehouse of the commands."""


def run(
    selection: Selection = "*",
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of new rows to show.")] = 10,
) -> None:
    """Materialize assets in this process; exit with 1 if an asset or one of its checks fails.

    Shows the new rows of the assets that no other selected asset reads. Leaves out assets with
    partitions, and the assets downstream of these. Without --file and --module, uses ./workspace.yaml,
    or the dg project in the working directory.
    """
    started, failed, found = time.monotonic(), False, False
    for defs in (one.defs for one in load_locations(file, module)):
        graph = graph_of(defs)
        keys = selected(graph, selection) & graph.materializable_asset_keys
        if parted := partitioned(graph, keys):
            keys -= parted
            names = ", ".join(sorted(key.to_user_string() for key in parted))
            typer.echo(
                f"leaves out {names}: assets with partitions, or downstream of these; materialize "
                "them in Dagster, for example with dg launch --assets … --partition …"
            )
        if not keys:
            continue
        found = True
        job = _job("vt_dagster_run", defs, dg.AssetSelection.assets(*keys))
        with instance_of() as instance:
            result = execute(job, instance, typer.echo)
        failed |= not _report(result, graph, keys, rows)
    if not found:
        raise DefinitionsError(
            "expected assets to materialize without a partition in the selection "
            f'{selection!r}, got none; give the name of an asset, "group:NAME", or "*" for all'
        )
    typer.echo(f"{'failed' if failed else 'done'} in {time.monotonic() - started:.0f} s")
    raise typer.Exit(1 if failed else 0)


def execute(
    job: dg.JobDefinition,
    instance: dg.DagsterInstance,
    say: Callable[[str], None],
    keys: Sequence[dg.AssetKey] | None = None,
) -> dg.ExecuteInProcessResult:
    """Runs a job in this process and prints a line for each asset when it is done.

    Args:
        keys: the assets to materialize; None = all assets of the job.
    """

    @dg.success_hook
    def tell(context: dg.HookContext) -> None:
        for metadata in context.op_output_metadata.values():
            # In a graph asset, only the last op has it.
            if "at_a_glance" in metadata and not _is_of_another_run(metadata):
                counts = records_of(str(metadata["at_a_glance"].value))
                say(f"{metadata['dagster/table_name'].value}: {counts}")

    return execute_quietly(job.with_hooks({tell}), instance, keys)


def _is_of_another_run(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a materialization reports what another run has committed, perhaps at the same
    time: without DAGSTER_HOME, Dagster knows no other run."""
    return {"at_a_glance", "status"} <= {*metadata}


def _report(result: dg.ExecuteInProcessResult, graph: Any, keys: set[dg.AssetKey], most: int) -> bool:
    """Prints checks, errors and new rows of a run; returns whether all succeeded."""
    found = result.get_asset_materialization_events()
    events = [e for e in found if not _is_of_another_run(e.materialization.metadata)]
    made = {e.asset_key for e in events}
    for one in (e.materialization for e in events):
        if "at_a_glance" not in one.metadata:  # an export, a publication, an asset of the user's own
            published: Any = one.metadata.get("records_published")
            what = "materialized"
            if published is not None:
                what = f"{counted(published.value, 'record')} published"
            typer.echo(f"{one.asset_key.to_user_string()}: {what}")
    if result.success and (idle := sorted(k.to_user_string() for k in keys - made)):
        typer.echo(f"nothing new for {', '.join(idle)}")
    checks = result.get_asset_check_evaluations()
    broken = [c for c in checks if not c.passed]
    for check in broken:
        name = f"{check.asset_key.to_user_string()}: {check.check_name}"
        typer.echo(f"{name}: {check.description or 'did not pass'}", err=True)
    if checks:
        typer.echo(f"checks: {len(checks) - len(broken)} of {len(checks)} passed")
    for step, error in errors_of(result):
        typer.echo(f"{step}: {error}" if step else error, err=True)
    for event in events:
        if not any(child in keys for child in graph.get(event.asset_key).child_keys):
            _show(event.materialization, most)
    stops = any(c.severity == dg.AssetCheckSeverity.ERROR for c in broken)
    return result.success and not stops


def _show(made: dg.AssetMaterialization, most: int) -> None:
    """Prints some of the rows that a run wrote, and the command that explains the first."""
    name = made.asset_key.to_user_string()
    about: dict[str, Any] = {key: value.value for key, value in made.metadata.items()}
    if about.get("log_rows", _READ + 1) > _READ:  # an asset of the user's own, or a log too large
        return
    warehouse = about["dagster/uri"].rpartition(f"/{name}/")[0]
    log = read(name, warehouse=warehouse, what="log")
    if not len(log):
        return
    new = log.filter(pc.field(RECORDED_AT) == pc.call_function("max", [log[RECORDED_AT]]))
    new = new.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
    columns = [c for c in new.column_names if c not in _OURS]
    table = TextTable(*map(_whole, columns), box=SIMPLE)
    schema: dg.TableSchema = about["dagster/column_schema"]
    key = {column.name for column in schema.columns if "key" in column.constraints.other}
    for row in texts(new.slice(0, most)):
        gone = row.get(IS_TOMBSTONE)
        table.add_row(*(Text("(deleted)" if gone and c not in key else shown(row[c])) for c in columns))
    typer.echo(f"new rows of {name}: {len(new):,}{f', of which {most:,}' if len(new) > most else ''}")
    Console().print(table)
    place = f"{new[PARTITION][0].as_py()}:{new[OFFSET][0].as_py()}"
    there = "" if Path(WAREHOUSE).absolute() == Path(warehouse) else f" --warehouse {warehouse}"
    typer.echo(f"explain the first row: vt-dagster explain {name} --offset {place}{there}")
