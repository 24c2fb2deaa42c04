"""``vt-dagster run``: materializes assets in this process and prints a summary.

The runs are recorded in the Dagster instance of ``DAGSTER_HOME``, like those of ``dg launch``; their
logs go to that instance and to the handlers of its ``dagster.yaml``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
import pyarrow.compute as pc
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.cli.check import (
    DefinitionsFile,
    DefinitionsModule,
    Selection,
    errors_of,
    execute_quietly,
    instance_of,
    load_definitions,
    selected,
)
from vt_dagster.columns import (
    CAUSE,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    REVISION,
    TIMESTAMP,
)
from vt_dagster.errors import DefinitionsError
from vt_dagster.orchestration.metadata import records_of
from vt_dagster.storage.arrow_reader import texts
from vt_dagster.storage.read import read

_OURS = {
    *(CAUSE, IS_LATE, IS_LATEST, IS_TOMBSTONE, OFFSET, OLD, PARTITION, RECORDED_AT, REVISION),
    TIMESTAMP,
}
"""The library's own columns: not shown."""
_READ = 1_000_000
"""Logs of more rows are not read: showing new rows reads the whole log."""
_WAREHOUSE = "data/warehouse"
"""The default warehouse of ``vt-dagster explain``."""

Say = Callable[[str], None]


def run(
    selection: Selection = "*",
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    rows: Annotated[int, typer.Option(help="Number of new rows to show.")] = 10,
) -> None:
    """Materialize assets in this process; exit with 1 if an asset or one of its checks fails.

    Shows the new rows of the assets that no other selected asset reads. Without --file and --module,
    uses the code locations of ./workspace.yaml.
    """
    started, failed, found = time.monotonic(), False, False
    for defs in load_definitions(file, module):
        graph = defs.resolve_asset_graph()
        keys = selected(graph, selection) & graph.materializable_asset_keys
        if not keys:
            continue
        found = True
        job = dg.define_asset_job("vt_dagster_run", dg.AssetSelection.assets(*keys))
        every = dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
        with instance_of() as instance:
            result = execute(every.resolve_job_def(job.name), instance, typer.echo)
        failed |= not _told(result, graph, keys, rows)
    if not found:
        raise DefinitionsError(
            f"expected assets to materialize in the selection {selection!r}, got none; give the name "
            'of an asset, "group:NAME", or "*" for all'
        )
    typer.echo(f"{'failed' if failed else 'done'} in {time.monotonic() - started:.0f} s")
    raise typer.Exit(1 if failed else 0)


def execute(
    job: dg.JobDefinition,
    instance: dg.DagsterInstance,
    say: Say,
    keys: Sequence[dg.AssetKey] | None = None,
) -> dg.ExecuteInProcessResult:
    """Runs a job in this process and prints a line for each asset when it is done.

    Args:
        keys: the assets to materialize; None = all assets of the job.
    """

    @dg.success_hook
    def tell(context: dg.HookContext) -> None:
        for metadata in context.op_output_metadata.values():
            if "at_a_glance" in metadata:  # in a graph asset, only the last op has it
                said = records_of(str(metadata["at_a_glance"].value))
                say(f"{metadata['dagster/table_name'].value}: {said}")

    return execute_quietly(job.with_hooks({tell}), instance, keys)


def _told(result: dg.ExecuteInProcessResult, graph: Any, keys: set[dg.AssetKey], most: int) -> bool:
    """Prints checks, errors and new rows of a run; returns whether all succeeded."""
    made = {e.asset_key for e in result.get_asset_materialization_events()}
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
        typer.echo(f"{step}: {error}", err=True)
    for event in result.get_asset_materialization_events():
        if not any(child in keys for child in graph.get(event.asset_key).child_keys):
            _show(event.materialization, most)
    stops = any(c.severity == dg.AssetCheckSeverity.ERROR for c in broken)
    return result.success and not stops


def _show(made: dg.AssetMaterialization, most: int) -> None:
    """Prints some of the rows that a run wrote, and the command that explains the first."""
    name = made.asset_key.to_user_string()
    about: dict[str, Any] = {key: value.value for key, value in made.metadata.items()}
    if (
        about.get("log_rows", _READ + 1) > _READ
    ):  # an asset of the user's own, or a log too large to read
        return
    warehouse = about["dagster/uri"].rpartition(f"/{name}/")[0]
    log = read(name, warehouse=warehouse, what="log")
    if not len(log):
        return
    new = log.filter(pc.field(RECORDED_AT) == pc.call_function("max", [log[RECORDED_AT]]))
    new = new.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
    columns = [c for c in new.column_names if c not in _OURS]
    table = TextTable(*map(escape, columns), box=SIMPLE)
    for row in texts(new.slice(0, most)):
        gone = row.get(IS_TOMBSTONE)
        table.add_row(*(Text("(deleted)" if gone else _text(row[c])) for c in columns))
    typer.echo(f"new rows of {name}: {len(new):,}{f', of which {most:,}' if len(new) > most else ''}")
    Console().print(table)
    place = f"{new[PARTITION][0].as_py()}:{new[OFFSET][0].as_py()}"
    there = "" if Path(_WAREHOUSE).absolute() == Path(warehouse) else f" --warehouse {warehouse}"
    typer.echo(f"explain the first row: vt-dagster explain {name} --offset {place}{there}")


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
