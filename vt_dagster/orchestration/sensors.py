"""Sensors: ask for a run where a source has something new, with what the run is to take."""

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
from vt_dagster.storage.log_snapshot import Head
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
    """Whether a sensor can look for what is new in its source. What comes from other assets, or from a
    function, is asked for by Dagster itself: automation conditions, schedules, jobs."""
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
    """A sensor that asks for a run when a source has what was not consumed: files, offsets, versions.

    The truth is the position in the asset's last commit; the cursor only says what was asked for
    last. The run's config names the files, or the range of offsets of each partition, and the run key
    follows from them, from the batch that they come after, and from an epoch that the cursor counts:
    the same input is asked for once, and again where the table has gone back since (a replay). A
    lost cursor or a doubled tick asks for nothing twice; a run that finds its input consumed commits
    nothing. While a run that a sensor asked for is unfinished, no other one is asked for.

    A cluster or directory that does not answer is a reason to skip the tick. Records that are gone
    before they were consumed are an error of the tick.

    Args:
        target: what to run; None = the asset and everything downstream of it. Assets with partitions,
            and what is made of those, are left out of its runs, which have none.
        minimum_records: of topics, wait until so many records are there,
        maximum_wait: but not longer than this since a tick first saw some.
        running: whether the sensor is on from the start.
        resource_prefix: as of :func:`build_asset`; of the resources it needs the warehouse.

    Raises:
        SourceError: there is nothing to look at, see :func:`has_sensor`.
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
    def sense(  # where a test calls it, Dagster gives the resources as arguments too
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
        context.update_cursor(seen.text)  # else a table that goes back from here is not noticed
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
