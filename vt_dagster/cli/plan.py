"""``vt-dagster plan``: what changed definitions do to the tables of a warehouse, before a run."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from shlex import quote
from typing import Annotated

import typer

from vt_dagster.cli.lookup import Warehouse
from vt_dagster.cli.tables import nodes_of
from vt_dagster.errors import TopologyError
from vt_dagster.runs.plan import Planned
from vt_dagster.runs.plan import plan as planned

STOPS = 3
"""The exit code if a run of some asset would fail: 1 is that of a crash, 2 of wrong arguments."""
_WORDS = {"goes_on": "goes on", "needs_replay": "needs a replay"}
_WIDTH = 80


def plan(
    module: Annotated[
        str, typer.Option("--module", "-m", help="The module with all streams and tables as variables.")
    ],
    asset: Annotated[
        list[str] | None, typer.Option("--asset", help="An asset to show; repeat it for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Show what the next runs do to the tables, with the definitions as they are now; changes nothing.

    Exits with 3 if an asset needs a replay or is refused; with 0 if all others are unchanged, new,
    removed, or go on.
    """
    nodes = list(nodes_of(module).values())
    if not nodes:
        raise TopologyError(
            f"expected streams and tables as variables of {module}, found none; name the module that "
            "declares them"
        )
    found = planned(warehouse, nodes, asset or None)
    stops = any(one.stops for one in found)
    if as_json:
        assets = [asdict(one) for one in found]
        told = {"warehouse": warehouse, "stops": stops, "assets": assets}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        for line in _lines(found, module, warehouse):
            typer.echo(line)
    raise typer.Exit(STOPS if stops else 0)


def _lines(found: Sequence[Planned], module: str, warehouse: str) -> Iterator[str]:
    for one in found:
        if one.verdict == "unchanged":
            continue
        yield f"{one.asset}: {_words(one.verdict)}"
        if one.verdict in ("needs_replay", "removed"):
            yield from _indented(f"its log has {one.rows:,} rows, {one.bytes:,} bytes")
        if one.downstream:
            count, names = len(one.downstream), ", ".join(one.downstream)
            noun = "asset" if count == 1 else "assets"
            yield from _indented(f"{count} {noun} downstream to replay after it: {names}")
        for change in one.changes:
            yield from _indented(change)
        if one.cause is not None:
            yield from _indented(f"it reads {one.cause}, of which a run says:")
        if one.reason:
            yield from _indented(one.reason)
        if one.verdict == "needs_replay":
            # A name with a key prefix is a path; the new tables have a plain name.
            name = one.asset.rpartition("/")[2]
            arguments = [name, "--into", f"{name}_new", "--module", module, "--warehouse", warehouse]
            yield f"    vt-dagster replay {' '.join(map(quote, arguments))}"
    counts = Counter(one.verdict for one in found)
    yield ", ".join(f"{count} {_words(verdict)}" for verdict, count in counts.items()) or "no assets"


def _words(verdict: str) -> str:
    return _WORDS.get(verdict, verdict)


def _indented(text: str) -> Iterator[str]:
    """Yields a text as lines of at most 80 columns; a longer word, like a path, is not cut."""
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
