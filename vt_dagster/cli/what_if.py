"""``vt-dagster what-if``: what would change with another declaration of an asset."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from vt_dagster.cli.lookup import Warehouse
from vt_dagster.cli.tables import node_of
from vt_dagster.errors import DefinitionsError
from vt_dagster.provenance.lateness import parse_share, share
from vt_dagster.runs import what_if as trial
from vt_dagster.spark.session import build_session
from vt_dagster.topology.model import with_settings


def what_if(
    asset: Annotated[str, typer.Argument(help="The live asset.")],
    module: Annotated[
        str, typer.Option(help="The module with the asset's trial declaration as a variable.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, like grace_period=2h; repeat it for more."),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="An input to recompute as well; repeat it for more.")
    ] = None,
    against_replay: Annotated[
        bool,
        typer.Option(
            "--against-replay",
            help="Compare with a replay without --set, not with the live table.",
        ),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Exit with 1 if more rows differ, like 0.1%.")
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(help="Directory or URL of the trial tables; default: in the warehouse."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Recompute an asset in a scratch place with another declaration, and show what would change."""
    node, allowed = node_of(module, asset), parse_share(budget)
    if against_replay and not settings:
        raise DefinitionsError(
            "--against-replay needs --set: it compares with a replay without --set; drop "
            "--against-replay to compare with the live table"
        )
    # SIGTERM becomes an exception, so that the scratch tables are removed.
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    found = trial.what_if(
        warehouse,
        with_settings(node, dict(map(_setting, settings or ()))),
        build_session("vt-dagster"),
        also=also or (),
        baseline=node if against_replay else None,
        scratch=scratch,
        tell=None if as_json else typer.echo,
    )
    if as_json:
        typer.echo(json.dumps({**asdict(found), "share": found.share}, indent=2, ensure_ascii=False))
    else:
        for line in _lines(found):
            typer.echo(line)
    raise typer.Exit(1 if allowed is not None and found.share > allowed else 0)


def _leave() -> Any:
    raise SystemExit(128 + signal.SIGTERM)


def _setting(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not equals:
        raise DefinitionsError(f"expected --set name=value, like grace_period=2h, got {given!r}")
    return name.strip(), value.strip()


def _lines(found: trial.Changes) -> Iterator[str]:
    yield f"recomputed: {', '.join(found.remade)}"
    yield f"{found.asset}: {found.rows_before:,} rows before, {found.rows_after:,} after"
    yield (
        f"{found.changed:,} rows change, {found.added:,} are added, {found.removed:,} removed "
        f"({share(found.share)}), of {found.keys:,} keys"
    )
    for what, columns in (("added", found.columns_added), ("removed", found.columns_removed)):
        if columns:
            yield f"columns {what}: {', '.join(columns)}"
    for column, (before, after) in found.sums.items():
        if before != after:
            yield f"sum of {column}: {_number(before)} before, {_number(after)} after"
    for one in found.examples:
        yield f"  {one.key}"
        yield f"    - {one.before or 'no row'}"
        yield f"    + {one.after or 'no row'}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.10g}"
