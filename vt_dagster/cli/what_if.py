"""``vt-dagster what-if``: what would change, were an asset declared otherwise."""

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
from vt_dagster.provenance.lateness import parse_share
from vt_dagster.provenance.lateness_picture import share
from vt_dagster.runs import what_if as trial
from vt_dagster.spark.session import build_session
from vt_dagster.topology.node_settings import with_settings


def what_if(
    asset: Annotated[str, typer.Argument(help="The live asset.")],
    module: Annotated[
        str, typer.Option(help="The module that has it, as it would be declared, as a variable.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, like grace_period=2h; repeat it for more."),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="An input that is made anew as well; repeat it.")
    ] = None,
    against_replay: Annotated[
        bool,
        typer.Option(
            "--against-replay",
            help="Compare with a replay of the module's asset without --set, not with what is live.",
        ),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Exit with 1 where more rows differ, like 0.1%.")
    ] = None,
    scratch: Annotated[
        str | None, typer.Option(help="Where it is made, a directory or URL; else in the warehouse.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Make an asset anew in a scratch place as it would be declared, and tell what would change."""
    node, allowed = node_of(module, asset), parse_share(budget)
    if against_replay and not settings:
        raise DefinitionsError(
            "expected --set with --against-replay: the asset of the module without it is what is "
            "compared with; leave it out to compare with what is live"
        )
    # Whoever ends it lets it clean up.
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
    yield f"made anew: {', '.join(found.remade)}"
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
        yield f"    - {one.before or 'not there'}"
        yield f"    + {one.after or 'not there'}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.10g}"
