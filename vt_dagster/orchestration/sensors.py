"""Sensors: request a run when a source has something new, and name it in the run config."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import dagster as dg

from vt_dagster.errors import RecordsGoneError, SourceError, VtDagsterError
from vt_dagster.orchestration.resources import PREFIX, warehouse_key, warehouse_of
from vt_dagster.runs.pin import source_of, start_waits
from vt_dagster.sources.base import News, Watched
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_ASSET = "vt_dagster/asset"


def has_sensor(node: Stream) -> bool:
    """Whether a sensor can poll the node's source. Runs for input from other assets, or from a
    function, are requested by Dagster itself: automation conditions, schedules, jobs."""
    return node.source is not None and not isinstance(node.source, FrameSource)


def build_sensor(
    node: Stream,
    *,
    target: dg.AssetSelection | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    minimum_records: int = 1,
    maximum_wait: timedelta = timedelta(minutes=5),
    running: bool = False,
    resource_prefix: str = PREFIX,
) -> dg.SensorDefinition:
    """Returns a sensor that requests a run when a source has new input: files, offsets, versions.

    The position in the asset's last commit decides what is new; the cursor only holds the last request.
    The run config names the files, or the offset range of each partition. The run key derives from
    this config, the last batch, and an epoch in the cursor: the same input is requested once, and again
    after the table went back (a replay). A lost cursor or a duplicate tick requests nothing twice; a
    run whose input is already consumed commits nothing. While a requested run is unfinished, the sensor
    requests no other one.

    If a cluster or directory does not respond, the tick is skipped. Records that are gone before they
    were consumed fail the tick.

    Args:
        target: what to run; None = the asset and everything downstream of it. The runs have no
            partition, so they leave out assets with partitions and everything downstream of these.
        minimum_records: for topics: wait for at least this many new records,
        maximum_wait: but no longer than this after a tick first saw any.
        running: whether the sensor is on from the start.
        resource_prefix: as in :func:`build_asset`; needs only the warehouse resource.

    Raises:
        SourceError: a sensor cannot poll the source, see :func:`has_sensor`.
    """
    source = _watched(node)
    selection = target or dg.AssetSelection.assets(dg.AssetKey(node.path)).downstream()

    @dg.sensor(
        name=name or f"{node.name}_sensor",
        target=selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description=f"Runs when there are new {source.describe()}.",
        required_resource_keys={warehouse_key(resource_prefix)},
    )
    def sense(  # called in a test, Dagster passes the resources as arguments too
        context: dg.SensorEvaluationContext, **_: Any
    ) -> dg.SensorResult | dg.SkipReason:
        store = AssetStore(warehouse_of(context, resource_prefix), node)
        try:
            head = store.head()
            commit = None if head is None else head.commit
            news = source.news(commit, store.consumed_files(head))
            if news.config is None and start_waits(node, commit):
                news = News({}, "the snapshot to start with")
        except RecordsGoneError:
            raise
        except (SourceError, OSError) as error:
            return dg.SkipReason(f"cannot look at {source.describe()}: {error}")
        except VtDagsterError as error:
            return dg.SkipReason(str(error))
        batch = 0 if head is None else head.commit.batch
        seen = _Cursor.read(context.cursor, batch, news.config is not None)
        context.update_cursor(seen.text)  # so that a table that goes back from here is noticed
        if news.config is None:
            return dg.SkipReason(f"no new {source.describe()}: {_consumed(head)}")
        waited = timedelta(seconds=round(time.time() - (seen.since or 0)))
        few = news.records is not None and news.records < minimum_records
        if few and waited < maximum_wait:
            return dg.SkipReason(
                f"{news.says}: waits for {minimum_records} records or for {maximum_wait} "
                f"(waited {waited})"
            )
        tags = {_ASSET: node.name}
        unfinished = _unfinished(context, tags)
        if unfinished:
            return dg.SkipReason(f"{news.says}: the run {unfinished} is still in progress")
        tags["vt_dagster/batch"] = str(batch + 1)
        chosen = _without_partitions(context, selection)
        return dg.SensorResult([_request(node, f"{seen.epoch}:{batch}", news.config, tags, chosen)])

    return sense


def _watched(node: Stream) -> Watched:
    if node.source is not None and not has_sensor(node):
        raise SourceError(
            f"{node.name}: expected a source that a sensor can poll, got {node.source.describe()}; "
            "give its asset an automation_condition or a schedule instead"
        )
    return cast(Watched, source_of(node))


def _without_partitions(
    context: dg.SensorEvaluationContext, selection: dg.AssetSelection
) -> list[dg.AssetKey] | None:
    """Returns the assets of a selection that a run without a partition can make; None = all of them."""
    if context.repository_def is None:  # a test calls the sensor without one
        return None
    graph = context.repository_def.asset_graph
    chosen = {key for key in selection.resolve(graph) if graph.get(key).is_executable}
    parted = [key for key in chosen if graph.get(key).partitions_def is not None]
    if not parted:
        return None
    return sorted(chosen - dg.AssetSelection.assets(*parted).downstream().resolve(graph))


def _request(
    node: Stream,
    place: str,
    config: Any,
    tags: Mapping[str, str],
    chosen: Sequence[dg.AssetKey] | None,
) -> dg.RunRequest:
    """Returns a run request for new input; the run key is the same for the same input."""
    digest = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]
    return dg.RunRequest(
        run_key=f"{node.name}:{place}:{digest}",
        run_config={"ops": {dg.AssetKey(node.path).to_python_identifier(): {"config": config}}},
        tags=tags,
        asset_selection=chosen,
    )


def _unfinished(context: dg.SensorEvaluationContext, tags: Mapping[str, str]) -> str | None:
    """Returns an unfinished run with these tags; None = there is none."""
    try:
        instance = context.instance
    except dg.DagsterInvariantViolationError:  # a test calls the sensor without one
        return None
    found = instance.get_run_records(dg.RunsFilter(tags=dict(tags), statuses=_UNFINISHED), limit=1)
    return found[0].dagster_run.run_id if found else None


def _consumed(head: Head | None) -> str:
    batch, records = (0, 0) if head is None else (head.commit.batch, head.commit.totals.get("in", 0))
    return f"batch {batch}, {records} records consumed"


@dataclass(frozen=True)
class _Cursor:
    """The state of a sensor; losing it does no harm.

    Args:
        epoch: incremented whenever the table went back to an earlier batch, as after a replay.
        batch: the table's last batch.
        since: when a tick first saw the waiting input (epoch seconds); None = nothing waits.
    """

    epoch: int
    batch: int
    since: float | None

    @classmethod
    def read(cls, cursor: str | None, batch: int, waiting: bool) -> "_Cursor":
        try:
            seen = json.loads(cursor or "")
            epoch = seen["epoch"] + (1 if batch < seen["batch"] else 0)
            since = seen.get("since") if seen["batch"] == batch else None
        except (ValueError, KeyError, TypeError):  # lost, or written by another sensor
            epoch, since = 0, None
        return cls(epoch, batch, (since or time.time()) if waiting else None)

    @property
    def text(self) -> str:
        since = {} if self.since is None else {"since": round(self.since)}
        return json.dumps({"epoch": self.epoch, "batch": self.batch, **since})
