"""Commands on tables: ``demo``, ``replay``, ``compare``, ``swap``, ``restate``, ``rebuild``, ``erase``.

``what-if``: what would change with another declaration of an asset. ``plan``: what changed definitions
do to the tables of a warehouse, before a run. ``catalog``: drops names in Spark's catalog whose asset
is no longer declared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import dagster as dg
import typer
from pyspark.sql import SparkSession
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.cli.lookup import DefinedWarehouse, OptionalKey, Warehouse
from vt_dagster.cli.run import (
    WAREHOUSE,
    DefinitionsFile,
    DefinitionsModule,
    Topology,
    accepted,
    graph_of,
    instance_of,
    load_locations,
    load_topology,
)
from vt_dagster.errors import DefinitionsError, StorageError, VtDagsterError, counted
from vt_dagster.orchestration.resources import WarehouseResource, session_of, spark_key, warehouse_key
from vt_dagster.orchestration.sensors import runs_with
from vt_dagster.provenance.lateness import parse_share, share
from vt_dagster.runs import erase as erasure
from vt_dagster.runs import plan as plans
from vt_dagster.runs import replay as replays
from vt_dagster.runs import restate as restatement
from vt_dagster.runs import what_if as trial
from vt_dagster.runs.export import last_export
from vt_dagster.runs.plan import Planned
from vt_dagster.sources.kafka_cluster import as_offsets
from vt_dagster.spark.session import build_session
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.catalog import drop, registered
from vt_dagster.topology.durations import parse_time
from vt_dagster.topology.model import Stream, derived_from, topological, with_settings

LiveAsset = Annotated[
    str | None, typer.Argument(help="The live asset; none with --planned.", show_default=False)
]


def demo(
    kafka: Annotated[
        bool,
        typer.Option("--kafka", help="Read from topics of a Kafka broker, which it starts and stops."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="A whole year, and all 18 assets of the example.")
    ] = False,
) -> None:
    """Run the demo of a clone of the repository: a winter's flights, each with the weather as of its
    departure."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        if kafka:
            from assets.kafka_demo import run
        elif everything:
            from assets.demo_all import run
        else:
            from assets.demo import run
    except ModuleNotFoundError as error:
        raise VtDagsterError(
            "the demo is part of a clone of the repository, not of the installed package: run it in "
            f"the clone's directory with the extra 'demo' installed ({error})"
        ) from None
    run()


def replay(
    asset: LiveAsset = None,
    into: Annotated[str | None, typer.Option(help="The name of the new tables.")] = None,
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    planned: Annotated[
        bool,
        typer.Option(
            "--planned",
            help="Replay all assets that need a replay by vt-dagster plan, and those downstream of "
            "them, into NAME_new, and swap them.",
        ),
    ] = False,
    no_swap: Annotated[
        bool,
        typer.Option("--no-swap", help="With --planned: leave the new tables beside the live ones."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --planned: do not ask in a terminal.")
    ] = False,
    start_time: Annotated[
        str | None, typer.Option("--from", help="For a topic: start at a time (inclusive); UTC.")
    ] = None,
    start_offsets: Annotated[
        str | None,
        typer.Option("--from-offsets", help='For topics: start offsets, {"topic": {"0": 100}}.'),
    ] = None,
    recorded_now: Annotated[
        bool,
        typer.Option("--recorded-now", help="Use few runs; the records get the current system time."),
    ] = False,
    warehouse: DefinedWarehouse = None,
) -> None:
    """Recompute an asset beside the live one, up to its position; then compare and swap.

    With --planned, recompute and swap all assets that need it; asks first in a terminal, and resumes an
    interrupted call. Without --file and --module, uses ./workspace.yaml, or the dg project in the
    working directory.
    """
    alone = [asset, into, start_time, start_offsets, recorded_now or None]
    if planned and any(one is not None for one in alone):
        raise DefinitionsError(
            "expected --planned without an asset and its options, since it takes the assets that need "
            "a replay as they are declared, got both; drop one of them"
        )
    if not planned and (asset is None or into is None or no_swap or yes):
        raise DefinitionsError(
            "expected an asset and --into, or --planned; --no-swap and --yes need --planned; give one "
            "of the two"
        )
    if start_time is not None and start_offsets is not None:
        raise DefinitionsError("expected either --from or --from-offsets, got both; drop one of them")
    topology = load_topology(file, module, warehouse)
    if asset is None or into is None:
        _replay_planned(topology, swapping=not no_swap, yes=yes)
        return
    node = topology.node(asset)
    start: Any = None if start_offsets is None else as_offsets(start_offsets)
    if start_time is not None:
        start = datetime.fromtimestamp(parse_time(start_time) / 1e6, tz=timezone.utc)
    spark = build_session("vt-dagster")
    tell, keep = typer.echo, not recorded_now
    done = replays.replay(topology.warehouse, node, into, spark, start, tell, keep).head()
    assert done is not None
    records = counted(done.commit.totals.get("in", 0), "record")
    typer.echo(f"{into}: {records} in {counted(done.commit.batch, 'run')}")


def _replay_planned(topology: Topology, swapping: bool, yes: bool) -> None:
    def confirm(chosen: Sequence[Planned]) -> None:
        rows, size = (Column(name, justify="right") for name in ("rows", "bytes"))
        title = "to replay" + (" and swap" if swapping else "")
        table = TextTable("asset", rows, size, "because", title=title, box=SIMPLE)
        for one in chosen:
            ups = [up.asset for up in chosen if one.asset in up.downstream]
            why = "it needs a replay" if one.verdict == "needs_replay" else f"downstream of {ups[0]}"
            table.add_row(Text(one.asset), f"{one.rows:,}", f"{one.bytes:,}", Text(why))
        Console().print(table)
        if not yes and sys.stdin.isatty():
            what = "Replay and swap them, while nothing else runs?" if swapping else "Replay them?"
            typer.confirm(what, abort=True)

    done = plans.replay_planned(
        topology.warehouse,
        [*topology.nodes.values()],
        _session_at_first_use(),
        swapping=swapping,
        tell=typer.echo,
        confirm=confirm,
    )
    if not done:
        typer.echo("no asset needs a replay")
    elif swapping:
        typer.echo(f"replayed and swapped: {', '.join(done)}")
    else:
        typer.echo(f"replayed: {', '.join(done.values())}; without --no-swap, this command swaps them")


def _session_at_first_use() -> Callable[[], SparkSession]:
    """Returns a function that starts Spark when it is first called: after names are looked up."""
    return cache(lambda: build_session("vt-dagster"))


def compare(
    one: Annotated[str, typer.Argument(help="An asset.")],
    other: Annotated[str, typer.Argument(help="The asset to compare it with.")],
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Show the rows that differ between two assets; exits with 1 if they differ."""
    spark = _session_at_first_use()
    stores = [AssetStore.open(warehouse, name, spark) for name in (one, other)]
    found = replays.compare(*stores)
    typer.echo(f"{counted(found.missing, 'row')} only in {one}, {found.extra:,} only in {other}")
    for row in found.rows.orderBy("row").limit(20).collect():
        name, times = (one, row[1]) if row[1] > 0 else (other, -row[1])
        typer.echo(f"  only in {name}{f' ({times} times)' if times > 1 else ''}: {row[0]}")
    raise typer.Exit(1 if found.missing or found.extra else 0)


def swap(
    live: Annotated[str, typer.Argument(help="The live asset.")],
    other: Annotated[str, typer.Argument(help="The asset that becomes the live one, a replay.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Also if neither is a replay of the other.")
    ] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Swap the names of two assets while nothing runs, so that a replay becomes the live asset. If
    neither is a replay of the other and their definitions differ (sources do not count), it asks in a
    terminal; elsewhere it needs --yes."""
    if not yes and not replays.related(warehouse, live, other):
        if not sys.stdin.isatty():
            raise StorageError(
                f"expected {other} to be a replay of {live}, or to have the same definition, got an "
                f"asset with another definition; replay {live} into a new name (vt-dagster replay) and "
                "swap that, or swap them anyway with --yes"
            )
        typer.confirm(f"{other} is no replay of {live}. Swap them?", abort=True)
    replays.swap(warehouse, live, other)
    typer.echo(f"swapped: {live} now has the tables that {other} had, and {other} those of {live}")


def restate(
    asset: Annotated[str, typer.Argument(help="The asset to recompute.")],
    start: Annotated[
        str, typer.Option("--from", help="Start time (inclusive); UTC if it has no offset.")
    ],
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be recomputed, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask in a terminal.")] = False,
    warehouse: DefinedWarehouse = None,
) -> None:
    """Recompute an asset and all its consumers in place, from a time on, while nothing runs; resumes
    an interrupted restatement. Asks first in a terminal.

    Without --file and --module, uses ./workspace.yaml, or the dg project in the working directory,
    with all consumers that are declared there.
    """
    topology = load_topology(file, module, warehouse)
    node, known = topology.node(asset), [*topology.nodes.values()]
    if not (dry_run or yes) and sys.stdin.isatty():
        typer.confirm(f"Recompute {asset} and its consumers from {start} on, in place?", abort=True)
    spark = build_session("vt-dagster")
    done = restatement.restate(
        topology.warehouse, node, start, spark, known, tell=typer.echo, dry_run=dry_run
    )
    what = "would recompute" if dry_run else "recomputed"
    typer.echo(f"{what}: {', '.join(done) or 'nothing'}")


def rebuild(
    asset: Annotated[str, typer.Argument(help="The table.")], warehouse: Warehouse = "data/warehouse"
) -> None:
    """Rebuild a table's view from its log, after its files were lost, damaged or overwritten."""
    AssetStore.open(warehouse, asset, _session_at_first_use(), typer.echo).rebuild_view()


def erase(
    asset: Annotated[str, typer.Argument(help="The asset that has the key.")],
    reason: Annotated[
        str, typer.Option(help="Written into the certificate: do not include the key.")
    ] = "",
    key: OptionalKey = None,
    where: Annotated[
        str | None, typer.Option(help="A SQL condition on the key columns, to erase many keys.")
    ] = None,
    file: DefinitionsFile = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--module", "-m", help="The module with the asset, all its consumers and exports."
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export", help="The directory of another export, or catalog:schema.table; repeat it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be erased, and change nothing.")
    ] = False,
    warehouse: DefinedWarehouse = None,
) -> None:
    """Erase a key from an asset, from everything derived from it under that key, and from exports,
    while nothing runs; writes a certificate. Resumes an interrupted erase.

    Without --file and --module, erases it from the asset alone.
    """
    if file is None and module is None:
        place = warehouse or WAREHOUSE
        node, known, found = AssetStore.open(place, asset, None).node, list[Stream](), list[str]()
    else:
        topology = load_topology(file, module, warehouse)
        node, known, place = topology.node(asset), [*topology.nodes.values()], topology.warehouse
        found = _exports(topology, node)
    done = erasure.erase(
        place,
        node,
        build_session("vt-dagster"),
        reason=reason,
        key=key,
        where=where,
        among=known,
        exports=[*dict.fromkeys([*found, *(export or [])])],
        tell=typer.echo,
        runs=_runs_with([node, *known], key) if key else None,
        dry_run=dry_run,
    )
    erased = sum(one.erased for one in done.searched.values())
    extent = f"{counted(erased, 'row')} of {counted(len(done.searched), 'table')}"
    if dry_run:
        typer.echo(f"would erase {extent}; nothing was changed")
    else:
        typer.echo(f"erased {extent}; certificate: {done.path}")


def _runs_with(nodes: Sequence[Stream], key: Sequence[str]) -> list[str] | None:
    """Returns the Dagster runs whose events contain a key; None if DAGSTER_HOME is not set."""
    if not os.environ.get("DAGSTER_HOME"):
        return None
    with instance_of() as instance:
        return runs_with(instance, [dg.AssetKey(node.path) for node in nodes], key)


def _exports(topology: Topology, node: Stream) -> list[str]:
    """Returns the places of the existing exports of an asset and of assets derived from it."""
    made = derived_from(node, topological([*topology.nodes.values()]))
    keys = {dg.AssetKey(one.path) for one in made}
    found: list[str] = []
    for spec in (spec for asset in topology.assets for spec in asset.specs):
        mine = spec.metadata.get("vt_dagster/kind") == "Export"
        if mine and any(dep.asset_key in keys for dep in spec.deps):
            catalog = spec.metadata.get("vt_dagster/iceberg_catalog")
            table = f"{catalog}:{spec.metadata.get('dagster/table_name')}"
            found.append(str(spec.metadata["dagster/uri"]) if catalog is None else table)
    return [place for place in found if last_export(place) is not None]


# What if


def what_if(
    asset: LiveAsset = None,
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    planned: Annotated[
        bool,
        typer.Option(
            "--planned", help="Show the changes of all assets that vt-dagster replay --planned replays."
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, like grace_period=2h; repeat it for more."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="An input of the asset to recompute as well; repeat it for more."),
    ] = None,
    against_replay: Annotated[
        bool,
        typer.Option(
            "--against-replay", help="Compare with a replay without --set, not with the live table."
        ),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Exit with 1 if a larger share of the rows differs, like 0.1%.")
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(help="Directory or URL of the trial tables; default: in the warehouse."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    warehouse: DefinedWarehouse = None,
) -> None:
    """Replay an asset in a scratch directory, as declared or with other settings, and show what
    would change. Without --file and --module, uses ./workspace.yaml, or the dg project in the working
    directory."""
    allowed = parse_share(budget)
    if planned == (asset is not None) or (planned and (settings or also or against_replay)):
        raise DefinitionsError(
            "expected an asset (--set, --also and --against-replay are optional), or --planned, which "
            "takes the assets that need a replay as they are declared; give one of the two"
        )
    if against_replay and not settings:
        raise DefinitionsError(
            "--against-replay needs --set: it compares with a replay without --set; drop "
            "--against-replay to compare with the live table"
        )
    topology = load_topology(file, module, warehouse)
    # SIGTERM becomes an exception, so that the scratch tables are removed.
    signal.signal(signal.SIGTERM, lambda *_: _exit_as_terminated())
    how: Any = {"scratch": scratch, "tell": None if as_json else typer.echo}
    if asset is None:
        nodes = [*topology.nodes.values()]
        found = trial.what_if_planned(topology.warehouse, nodes, build_session("vt-dagster"), **how)
    else:
        node = topology.node(asset)
        changed = with_settings(node, dict(map(_setting, settings or ())))
        how |= {"also": also or (), "baseline": node if against_replay else None}
        found = [trial.what_if(topology.warehouse, changed, build_session("vt-dagster"), **how)]
    if as_json:
        documents = [{**asdict(one), "share": one.share} for one in found]
        document = {"assets": documents} if planned else documents[0]
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        for line in (line for one in found for line in _lines(one)):
            typer.echo(line)
        if not found:
            typer.echo("no asset needs a replay")
    raise typer.Exit(1 if allowed is not None and any(one.share > allowed for one in found) else 0)


def _exit_as_terminated() -> Any:
    raise SystemExit(128 + signal.SIGTERM)


def _setting(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not equals:
        raise DefinitionsError(f"expected --set name=value, like grace_period=2h, got {given!r}")
    return name.strip(), value.strip()


def _lines(found: trial.Changes) -> Iterator[str]:
    yield f"recomputed: {', '.join(found.remade)}"
    yield f"{found.asset}: {counted(found.rows_before, 'row')} before, {found.rows_after:,} after"
    yield (
        f"{counted(found.changed, 'row changes', 'rows change')}, "
        f"{counted(found.added, 'is added', 'are added')}, {found.removed:,} removed "
        f"({share(found.share)}), of {counted(found.keys, 'key')}"
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


# Plan


STOPS = 3
"""The exit code if the next run of an asset would fail; 1 means a crash, 2 wrong arguments."""
_WORDS = {"goes_on": "goes on", "needs_replay": "needs a replay"}
_WIDTH = 80


def plan(
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    asset: Annotated[
        list[str] | None, typer.Option("--asset", help="An asset to show; repeat it for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    warehouse: DefinedWarehouse = None,
) -> None:
    """Show what the next runs do to the tables, with the definitions as they are now; changes nothing.

    Exits with 3 if an asset needs a replay or is refused, else with 0: each asset is unchanged, new or
    removed, or goes on. Without --file and --module, uses ./workspace.yaml, or the dg project in the
    working directory.
    """
    topology = load_topology(file, module, warehouse)
    found = plans.plan(topology.warehouse, [*topology.nodes.values()], asset or topology.chosen)
    stops = any(one.stops for one in found)
    if as_json:
        assets = [asdict(one) for one in found]
        document = {"warehouse": topology.warehouse, "stops": stops, "assets": assets}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        named = [*topology.options, *(["--warehouse", warehouse] if warehouse else [])]
        for line in _plan_lines(found, named):
            typer.echo(line)
    raise typer.Exit(STOPS if stops else 0)


def _plan_lines(found: Sequence[Planned], named: Sequence[str]) -> Iterator[str]:
    for one in found:
        if one.verdict == "unchanged":
            continue
        yield f"{one.asset}: {_words(one.verdict)}"
        if one.verdict in ("needs_replay", "removed"):
            yield from _indented(f"its log has {counted(one.rows, 'row')}, {one.bytes:,} bytes")
        if one.downstream:
            many, names = counted(len(one.downstream), "asset"), ", ".join(one.downstream)
            yield from _indented(f"{many} downstream to replay after it: {names}")
        for change in one.changes:
            yield from _indented(change)
        if one.cause is not None and not _is_stuck(one):
            yield from _indented(f"it reads {one.cause}, whose tables are refused:")
        if one.reason:
            yield from _indented(one.reason)
        if _is_stuck(one):
            yield from _indented(f"it reads {one.cause}, whose tables are refused: correct that first")
        elif one.verdict == "needs_replay":
            # A name with a key prefix is a path; the new tables have a plain name.
            name = one.asset.rpartition("/")[2]
            arguments = [name, "--into", f"{name}_new", *named]
            yield f"    vt-dagster replay {' '.join(map(quote, arguments))}"
    if _are_replayable(found):
        arguments = ["--planned", *named]
        yield f"to replay and swap them all: vt-dagster replay {' '.join(map(quote, arguments))}"
    counts = Counter(one.verdict for one in found)
    yield ", ".join(f"{count} {_words(verdict)}" for verdict, count in counts.items()) or "no assets"


def _is_stuck(one: Planned) -> bool:
    return one.cause is not None and one.verdict == "needs_replay"


def _are_replayable(found: Sequence[Planned]) -> bool:
    """Returns whether ``replay --planned`` has something to do, and is not refused by the plan."""
    try:
        # The refused input may not be among them (--asset), so its reason is unknown here.
        return bool(plans.to_replay(found)) and not any(map(_is_stuck, found))
    except StorageError:
        return False


def _words(verdict: str) -> str:
    return _WORDS.get(verdict, verdict)


def _indented(text: str) -> Iterator[str]:
    """Yields a text as lines of at most 80 columns; a longer word, like a path, is not cut."""
    lines = textwrap.wrap(text, _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    yield from (f"    {line}" for line in lines)


# Names in a catalog


def catalog(
    file: DefinitionsFile = None,
    module: DefinitionsModule = None,
    dropping: Annotated[
        bool, typer.Option("--drop", help="Drop the names that it shows; their tables remain.")
    ] = False,
) -> None:
    """Show the names in Spark's catalog whose asset is no longer in the definitions; --drop drops them.

    Without --file and --module, uses ./workspace.yaml, or the dg project in the working directory. An
    asset that only another code location declares counts as removed.
    """
    found = [one.every for one in load_locations(file, module)]
    declared = {key.to_user_string() for defs in found for key in graph_of(defs).get_all_asset_keys()}
    end = warehouse_key("")
    places = [
        (defs.resources or {}, key.removesuffix(end))
        for defs in found
        for key, resource in (defs.resources or {}).items()
        if isinstance(resource, WarehouseResource) and resource.catalog is not None
    ]
    if not places:
        raise DefinitionsError(
            "expected a WarehouseResource(catalog=…) in the definitions, found none: no table of them "
            "has a name in a catalog; name other definitions with --file or --module"
        )
    for every, prefix in places:
        wanted = {key: every[key] for key in (warehouse_key(prefix), spark_key(prefix))}
        with accepted(), dg.build_resources(wanted) as resources:
            where: WarehouseResource = getattr(resources, warehouse_key(prefix))
            spark = session_of(getattr(resources, spark_key(prefix)))
            assert where.catalog is not None
            names = registered(spark, where.catalog, where.path)
            gone = {name: asset for name, asset in names.items() if asset not in declared}
            if dropping:
                drop(spark, where.catalog, gone)
        for name, asset in gone.items():
            done = "dropped, " if dropping else ""
            typer.echo(f"{where.catalog}.{name}: {done}its asset {asset} is not in the definitions")
        typer.echo(
            f"{where.catalog}: {counted(len(names), 'name of an asset', 'names of assets')} in "
            f"{where.path}, {len(gone):,} of them "
            f"{'dropped' if dropping else 'of removed assets'}"
            + ("; drop these: --drop" if gone and not dropping else "")
        )
