"""The effect of changed definitions on a live warehouse, before a run; and the replays that they need.

A plan writes nothing, and needs no Spark. Its verdicts are those of a run: the same functions read the
last commits, compare them with the declaration, and raise the same errors. What only the data can tell
is left to the run: the checks of a contract, and the types of columns that Spark derives from
expressions.

Planned replays are made beside the live tables, each from those of its inputs. At the end all are
swapped. What is left to do follows from the tables, so that a killed call is completed by another one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import SparkSession

from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import (
    NeedsReplayError,
    SourceError,
    StorageError,
    TopologyError,
    VtDagsterError,
    counted,
)
from vt_dagster.runs.pin import before_of, from_source, require_consumable
from vt_dagster.runs.replay import (
    LONGER,
    AssetStores,
    is_replay,
    lost_records,
    renamed,
    replay,
    replay_id,
    require_history,
    require_inputs,
    require_kept,
    swap,
)
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of, require_in_place, swap_folder
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import published
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.storage.spark_reader import Snapshot
from vt_dagster.topology.model import Stream, Table, derived_from, topological

Verdict = Literal["unchanged", "new", "goes_on", "needs_replay", "refused", "removed"]
"""``goes_on``: the next run applies the change in place. ``removed``: in the warehouse, not among the
definitions."""


@dataclass(frozen=True)
class Planned:
    """The effect of the definitions on one asset.

    Args:
        asset: its name in the warehouse, with its key prefix.
        verdict: see :data:`Verdict`.
        changes: of an asset that goes on: each change, as text.
        reason: the error of a run, with the way out; empty = a run goes on.
        cause: the input whose tables are the reason; None = the asset's own, or none. Of an asset that
            needs a replay: an input whose tables are refused. A replay would be refused for the same
            reason.
        rows, bytes: of the files of its log; 0 = there is none.
        downstream: the assets that consume its log, directly or not. After a replay and swap they need
            a replay as well, because offsets of the new log mean other records.
    """

    asset: str
    verdict: Verdict
    changes: tuple[str, ...] = ()
    reason: str = ""
    cause: str | None = None
    rows: int = 0
    bytes: int = 0
    downstream: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether the next run of the asset fails."""
        return self.verdict in ("needs_replay", "refused")


def plan(
    warehouse: str, nodes: Sequence[Stream], assets: Collection[str] | None = None
) -> list[Planned]:
    """Returns what the next runs of streams and tables do to a warehouse; inputs come first, removed
    assets last.

    The sources are asked for new input as by a run, so their files or topics must be within reach; a
    source that does not answer is a refusal. A source of DataFrames is not asked.

    Args:
        nodes: all streams and tables of the warehouse, with or without their inputs.
        assets: names of the assets to return; None = all.

    Raises:
        TopologyError: ``assets`` has a name that is neither declared nor in the warehouse.
    """
    every = topological(nodes)
    names = ["/".join(node.path) for node in every]
    others = [name for name in asset_names(warehouse) if name not in names]
    # The log of a publication has no rows of an asset; whether it is declared is not known here.
    gone = [name for name in others if not published(head_of(warehouse, name)[1])]
    unknown = sorted({*(assets or ())} - {*names, *gone})
    if unknown:
        raise TopologyError(
            f"expected assets of {names + gone}, got {unknown}; choose some of them, or leave the "
            "names out for all"
        )
    chosen = {*names, *gone} if assets is None else {*assets}
    stores = stores_of(warehouse)  # without a session: a plan needs none
    found = [_planned(node, every, stores) for node in every if "/".join(node.path) in chosen]
    left = [AssetStore.open(warehouse, name, None) for name in gone if name in chosen]
    return [*found, *(one for store in left for one in _removed(store))]


def _planned(
    node: Stream, every: Sequence[Stream], stores: AssetStores, ask_sources: bool = True
) -> Planned:
    store, name = stores(node), "/".join(node.path)
    try:
        at = _pinned(node, stores, ask_sources)
    except NeedsReplayError as error:
        about: dict[str, Any] = {"downstream": _consumers(node, every), **_size(store)}
        return Planned(name, "needs_replay", (), str(error), _refused_input(node, stores), **about)
    except (VtDagsterError, OSError, _InputError) as error:
        cause = error.cause if isinstance(error, _InputError) else None
        return Planned(name, "refused", (), str(error), cause, **_size(store))
    if at.head is None:
        return Planned(name, "new")
    changes = tuple(_changes(store, at))
    return Planned(name, "goes_on" if changes else "unchanged", changes, **_size(store))


def _refused_input(node: Stream, stores: AssetStores) -> str | None:
    """Returns an input whose tables are refused for a reason that a replay does not remove."""
    for up in node.inputs:
        try:
            stores(up).snapshot()
        except NeedsReplayError:
            continue
        except (VtDagsterError, OSError):
            return "/".join(up.path)
    return None


class _InputError(Exception):
    """A run is refused because the tables of one of its inputs are."""

    def __init__(self, up: Stream, error: Exception) -> None:
        super().__init__(str(error))
        self.cause = "/".join(up.path)


def _pinned(node: Stream, stores: AssetStores, ask_sources: bool) -> Snapshot:
    """Makes the checks of the asset's next run, in the order of a run, and raises the first error;
    returns the snapshot that the run starts from."""
    store = stores(node)
    at = store.snapshot()
    if at.head is None:
        require_in_place(store.warehouse, "/".join(node.path))
    if node.operator is not None:
        consumed = {up.name for up in processor_of(node).plan().consumed}
        for up in {up.name: up for up in node.inputs}.values():
            try:
                head = stores(up).snapshot().head
            except VtDagsterError as error:
                raise _InputError(up, error) from None
            if head is not None and up.name in consumed:
                require_consumable(node, up, at.head, head.commit, stores)
    elif ask_sources and not isinstance(node.source, FrameSource):
        from_source(node, store, at, None)
    store.require_writable(before_of(node, at.head).batch + 1)
    return at


def _changes(store: AssetStore, at: Snapshot) -> Iterator[str]:
    node, head = store.node, at.head
    assert head is not None
    columns = store.columns(log_schema(node), head)
    if columns.summary:
        yield columns.summary
    yield from shape_of(node).changed_settings(head.commit.shape)
    stored = isinstance(node, Table) and delta.exists(store.view_path)
    if stored and (at.base is None or not at.base.is_view):
        yield "the next run rebuilds the view from the log"


def _consumers(node: Stream, every: Sequence[Stream]) -> tuple[str, ...]:
    """Returns the assets that consume the log of an asset, directly or not, inputs first."""
    found = {node.name: node}
    for one in every:
        consumed = () if one.operator is None else processor_of(one).plan().consumed
        if any(up.name in found for up in consumed):
            found[one.name] = one
    return tuple("/".join(one.path) for one in found.values() if one is not node)


def _removed(store: AssetStore) -> Iterator[Planned]:
    """Yields the plan of an asset that no definition declares; none for a replay beside a live
    asset."""
    head = store.head()
    if head is not None and not is_replay(head.commit):
        yield Planned("/".join(store.node.path), "removed", **_size(store))


def _size(store: AssetStore) -> dict[str, Any]:
    files = delta.files(store.log_path) if delta.exists(store.log_path) else []
    return {"rows": sum(file.rows for file in files), "bytes": sum(file.size for file in files)}


# Planned replays


def to_replay(found: Sequence[Planned]) -> list[Planned]:
    """Returns the assets of a plan that need a replay, and those downstream that need one after their
    swap; inputs first.

    Args:
        found: the plan of all assets.

    Raises:
        StorageError: the next run of one of them is refused for a reason that a replay does not remove.
    """
    names = {
        name for one in found if one.verdict == "needs_replay" for name in (one.asset, *one.downstream)
    }
    causes = {one.cause for one in found if one.verdict == "needs_replay"} - names
    for one in found:
        refused = one.asset in names and one.verdict == "refused" and one.cause not in names
        if refused or one.asset in causes:
            raise StorageError(
                f"{one.asset}: expected that it needs only a replay, but its runs are refused for "
                f"another reason; correct that first: {one.reason}"
            )
    return [one for one in found if one.asset in names and one.verdict != "new"]


def replay_planned(
    warehouse: str,
    nodes: Sequence[Stream],
    spark: SparkSession | Callable[[], SparkSession],
    *,
    swapping: bool = True,
    tell: Callable[[str], None] | None = None,
    confirm: Callable[[list[Planned]], None] | None = None,
) -> dict[str, str]:
    """Replays the assets that need a replay, and those downstream of them, beside the live ones, and
    then swaps them all.

    The live tables are unchanged until the last replay is complete. Nothing else may run during the
    swaps. To complete an interrupted call, call again with the same arguments.

    Args:
        nodes: all streams and tables of the warehouse, with or without their inputs.
        spark: a session, or a function that creates it after ``confirm``.
        swapping: False = leave the replays beside the live tables; a later call swaps them.
        tell: is called with one line per run and swap.
        confirm: is called with the assets before the first replay; raises to prevent all.

    Returns:
        the new tables by asset, inputs first; after the swap their name has the earlier tables.

    Raises:
        StorageError: see :func:`to_replay`; the name of the new tables has others already; or the
            history of a looked-up table does not cover the records to join again.
        SourceError: a source no longer has the records.
    """
    every = {"/".join(node.path): node for node in topological(nodes)}
    into = {name: "/".join(renamed(node, _beside(node)).path) for name, node in every.items()}
    say = tell or (lambda _: None)

    def exchange(name: str) -> None:
        swap(warehouse, name, into[name])
        say(f"{name}: swapped; {into[name]} has the earlier tables")

    fs, root = delta.filesystem(str(warehouse))
    for name, other in into.items():
        if fs.exists(posixpath.join(root, swap_folder(name, other))):
            exchange(name)
    chosen = to_replay(plan(warehouse, [*every.values()]))
    for one in chosen:
        _require_free(warehouse, every[one.asset], into[one.asset])
    if chosen and confirm is not None:
        confirm(chosen)
    for one in chosen:
        _require_whole(warehouse, every[one.asset], spark)
    made = dict[str, str]()
    for one in chosen:
        node = every[one.asset]
        new = replay(warehouse, node, _beside(node), spark, tell=tell, inputs=made)
        _require_as_many(AssetStore(warehouse, node), new)
        made[node.name] = _beside(node)
    for one in chosen if swapping else ():
        exchange(one.asset)
    return {one.asset: into[one.asset] for one in chosen}


def _beside(node: Stream) -> str:
    return f"{node.name}_new"


def _require_free(warehouse: str, node: Stream, path: str) -> None:
    """Checks that the new tables of an asset do not exist, or are its interrupted replay."""
    copy = renamed(node, _beside(node))
    head = AssetStore(warehouse, copy).head()
    if head is None:
        return
    same = head.commit.shape.definition() == shape_of(copy).definition()
    if not same or head.commit.run_id != replay_id(node.name):
        raise StorageError(
            f"{'/'.join(node.path)}: expected no tables {path}, or those of a replay of the same "
            "definition that was interrupted, got others, which may be the tables from before an "
            f"earlier replay; remove the directory {path} of the warehouse if nothing needs it"
        )


def _require_whole(
    warehouse: str, node: Stream, spark: SparkSession | Callable[[], SparkSession]
) -> None:
    """Checks before the first replay that no replay would lose records or matches, because the new
    tables become the live ones without a comparison."""

    def stores(one: Stream) -> AssetStore:
        there = AssetStore(warehouse, one, spark)
        # As its last commit describes it: the declaration may be one that its log cannot be read with.
        return there if there.head() is None else AssetStore.open(warehouse, "/".join(one.path), spark)

    if node.operator is not None:
        require_inputs(node, stores)
        require_history(node, stores, None, LONGER)
        return
    command = f"vt-dagster replay {node.name} --into {_beside(node)}"
    instead = f"replay it by itself ({command}), compare and swap"
    require_kept(node, AssetStore(warehouse, node), instead)


def _require_as_many(live: AssetStore, new: AssetStore) -> None:
    """Checks before the first swap that a source still had the records that the live log was made of:
    all but those that were erased."""
    lost = lost_records(live, new)
    if lost is not None:
        (taken, found), name = lost, "/".join(live.node.path)
        path = "/".join(new.node.path)
        raise SourceError(
            f"{name}: expected the {counted(taken, 'record')} of its source that its log was made of, "
            f"got {found:,}: the others no longer exist, and are missing in {path}. To accept that, "
            f"compare the two (vt-dagster compare {name} {path}), swap them (vt-dagster swap {name} "
            f"{path}) and run this again; else put them back, and remove the directory {path} of the "
            "warehouse"
        )


def require_restatable(warehouse: str, node: Stream, nodes: Sequence[Stream]) -> None:
    """Checks by a plan that an asset and its consumers can be restated.

    Only a refused asset prevents that; assets that need a replay are replayed. A refusal that is caused
    by an input that is restated too does not count, since the input gets new tables. The plan does not
    look for new input of sources, since they are read again in any case.

    Args:
        nodes: all known streams and tables, inputs first.

    Raises:
        StorageError: the next run of one of them is refused.
    """
    again = derived_from(node, nodes)
    names = {"/".join(one.path) for one in again}
    stores = stores_of(warehouse)
    for node in again:
        if stores(node).head() is None:
            continue  # it has no tables to make again
        one = _planned(node, nodes, stores, ask_sources=False)
        if one.verdict == "refused" and one.cause not in names:
            raise StorageError(
                f"{one.asset}: expected that its next run is accepted, because a restatement repeats "
                f"its runs, but it is refused: {one.reason}"
            )
