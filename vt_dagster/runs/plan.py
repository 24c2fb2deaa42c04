"""What changed definitions do to a live warehouse, before a run does it. Writes nothing, without Spark.

The verdicts are those of a run: the same functions read the last commits, compare them with the
declaration, and raise the same errors. What only the data can tell is left to the run: the checks of a
contract, and the types of columns that Spark derives from expressions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import NeedsReplayError, TopologyError, VtDagsterError
from vt_dagster.runs.pin import before_of, from_source, require_consumable
from vt_dagster.runs.replay import AssetStores
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, require_in_place
from vt_dagster.storage.asset_store import AssetStore, shape_of
from vt_dagster.storage.spark_reader import Snapshot, columns_of
from vt_dagster.topology.model import Stream, Table, topological

Verdict = Literal["unchanged", "new", "goes_on", "needs_replay", "refused", "removed"]
"""``goes_on``: the next run applies the change in place. ``removed``: in the warehouse, not among the
definitions."""


@dataclass(frozen=True)
class Planned:
    """What the definitions do to one asset.

    Args:
        asset: its name in the warehouse, with its key prefix.
        verdict: see :data:`Verdict`.
        changes: of an asset that goes on: each change, as text.
        reason: the error of a run, with the way out; empty = a run goes on.
        cause: the input whose tables are the reason; None = the asset's own, or none.
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
    gone = [name for name in asset_names(warehouse) if name not in names]
    unknown = sorted({*(assets or ())} - {*names, *gone})
    if unknown:
        raise TopologyError(
            f"expected assets of {names + gone}, got {unknown}; choose some of them, or leave the "
            "names out for all"
        )
    chosen = {*names, *gone} if assets is None else {*assets}

    def stores(node: Stream) -> AssetStore:
        return AssetStore(warehouse, node)  # without a session: a plan needs none

    found = [_planned(node, every, stores) for node in every if "/".join(node.path) in chosen]
    others = [AssetStore.open(warehouse, name, None) for name in gone if name in chosen]
    return [*found, *(one for store in others for one in _removed(store))]


def _planned(node: Stream, every: Sequence[Stream], stores: AssetStores) -> Planned:
    store, name = stores(node), "/".join(node.path)
    try:
        at = _pinned(node, stores)
    except NeedsReplayError as error:
        downstream = _consumers(node, every)
        return Planned(name, "needs_replay", (), str(error), downstream=downstream, **_size(store))
    except _InputError as error:
        return Planned(name, "refused", (), str(error), cause=error.cause, **_size(store))
    except (VtDagsterError, OSError) as error:
        return Planned(name, "refused", (), str(error), **_size(store))
    if at.head is None:
        return Planned(name, "new")
    changes = tuple(_changes(store, at))
    return Planned(name, "goes_on" if changes else "unchanged", changes, **_size(store))


class _InputError(Exception):
    """The tables of an input are refused, and so is a run that reads them."""

    def __init__(self, up: Stream, error: Exception) -> None:
        super().__init__(str(error))
        self.cause = "/".join(up.path)


def _pinned(node: Stream, stores: AssetStores) -> Snapshot:
    """Raises the error of the asset's next run, in the order of a run; returns where it starts from."""
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
    elif not isinstance(node.source, FrameSource):
        from_source(node, store, at, None, {})
    store.require_writable(before_of(node, at.head).batch + 1)
    return at


def _changes(store: AssetStore, at: Snapshot) -> Iterator[str]:
    node, head = store.node, at.head
    assert head is not None
    columns = columns_of(node, store.warehouse, store.log_path, log_schema(node), head)
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
    """Yields an asset that no definition has; a replay beside a live asset is none."""
    head = store.head()
    if head is not None and not (head.commit.run_id or "").startswith("replay:"):
        yield Planned("/".join(store.node.path), "removed", **_size(store))


def _size(store: AssetStore) -> dict[str, Any]:
    files = delta.files(store.log_path) if delta.exists(store.log_path) else []
    return {"rows": sum(file.rows for file in files), "bytes": sum(file.size for file in files)}
