"""Sensors: request a run when a source has new input, and name that input in the run config.

Another sensor requests the partitions of a user's asset that late changes of a table made stale. The
search of Dagster's event storage finds runs whose events contain a value, for example in samples.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import dagster as dg
from pydantic import BaseModel, ValidationError

from vt_dagster.errors import (
    RecordsGoneError,
    SourceError,
    StorageError,
    StoreUnavailableError,
    TopologyError,
    VtDagsterError,
    counted,
)
from vt_dagster.orchestration.decorators import reported_batch, step_events
from vt_dagster.orchestration.io_manager import AS_KNOWN_AT, AS_OF, PARTITION_END, READ, READS
from vt_dagster.orchestration.resources import PREFIX, asset_op, warehouse_key, warehouse_of
from vt_dagster.runs.pin import snapshot_is_pending, source_of
from vt_dagster.sources.base import News, Watched
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.stale_reads import UNDECIDABLE, Position, Read, StaleRead, stale_reads
from vt_dagster.topology.durations import check_duration, in_utc
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.options import Consumer, check_arguments, require_readable

# Event search


def runs_with(
    instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey], values: Sequence[object]
) -> list[str]:
    """Returns the ids of the runs of some assets with an event that contains a key, oldest first.

    A run is one of these assets' if an event names an asset. An event contains the key if its text
    contains each value. Reads all events of all runs.

    Args:
        values: the values of the key.
    """
    wanted, names = [str(value) for value in values], {key.to_user_string() for key in assets}
    found = list[str]()
    for run_id in reversed(instance.get_run_ids()):
        events = [str(event) for event in instance.all_logs(run_id)]
        of_ours = any(name in event for name in names for event in events)
        if of_ours and any(all(value in event for value in wanted) for event in events):
            found.append(run_id)
    return found


# Sensors


_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_MOST_FAILURES, _LONGEST_WAIT = 16, 3600
"""The number of failed runs that are counted, and the longest wait after them in seconds."""
_FAILED = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_ASSET, _RUN_KEY = "vt_dagster/asset", "dagster/run_key"


def has_sensor(node: Stream) -> bool:
    """Whether a sensor can poll the node's source. Runs for input from other assets, or from a
    function, are requested by Dagster itself: automation conditions, schedules, jobs."""
    return node.source is not None and not isinstance(node.source, FrameSource)


@check_arguments()
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
    this config, the last batch, the sizes and modification times of files, and an epoch in the cursor:
    the same input is requested once, and again if a file was repaired, or after the table went back (a
    replay). A lost cursor or a duplicate tick requests nothing twice; a run whose input is already
    consumed commits nothing. While a requested run is unfinished, the sensor requests no other one.

    The input of a run that failed, or was canceled, is not requested again by itself: the tick names
    the run. A re-execution takes it, a retry policy too, and so does the next run with more input. If
    that fails too, the sensor waits longer after each failure, up to an hour.

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
    if node.source is not None and not has_sensor(node):
        raise SourceError(
            f"{node.name}: expected a source that a sensor can poll, got {node.source.describe()}; "
            "give its asset an automation_condition or a schedule instead"
        )
    check_duration(node.name, "maximum_wait", maximum_wait)
    for what, least in (
        ("minimum_interval_seconds", minimum_interval_seconds),
        ("minimum_records", minimum_records),
    ):
        if least < 0:
            raise TopologyError(
                f"{node.name}: expected {what} of its sensor to be 0 or more, got {least}; correct it"
            )
    source = cast(Watched, source_of(node))
    wanted = target or dg.AssetSelection.assets(dg.AssetKey(node.path)).downstream()
    made = _WithoutPartitions(wanted)

    @dg.sensor(
        name=name or f"{node.name}_sensor",
        target=made,
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
            if news.config is None and snapshot_is_pending(node, commit):
                news = News({}, "the snapshot to start with")
        except RecordsGoneError:
            raise
        except StoreUnavailableError as error:  # the warehouse's store, not the source
            return dg.SkipReason(str(error))
        except (SourceError, OSError) as error:
            return dg.SkipReason(f"cannot look at {source.describe()}: {error}")
        except VtDagsterError as error:
            return dg.SkipReason(str(error))
        batch = 0 if commit is None else commit.batch
        seen = _Cursor.read(context.cursor, batch, news.config is not None)
        context.update_cursor(seen.text)  # a smaller batch in a later tick shows a restored table
        if news.config is None:
            held = f"; {news.description}" if news.description else ""
            consumed = counted(0 if commit is None else commit.totals.get("in", 0), "record")
            done = f"batch {batch}, {consumed} consumed"
            return dg.SkipReason(f"no new {source.describe()}: {done}{held}")
        waited = timedelta(seconds=round(time.time() - (seen.since or 0)))
        few = news.records is not None and news.records < minimum_records
        if few and waited < maximum_wait:
            return dg.SkipReason(
                f"{news.description}: waits for {counted(minimum_records, 'record')} or for "
                f"{maximum_wait} (waited {waited})"
            )
        tags = {_ASSET: "/".join(node.path)}
        unfinished = _run_of(context, tags, _UNFINISHED)
        if unfinished:
            return dg.SkipReason(
                f"{news.description}: the run {unfinished} is still in progress; if its process has "
                "died, mark it as canceled, or let Dagster's run monitoring do that"
            )
        tags["vt_dagster/batch"] = str(batch + 1)
        waits = _after_failures(context, tags, minimum_interval_seconds)
        if waits is not None:
            return dg.SkipReason(f"{news.description}: {waits}")
        chosen = _assets_of_run(context, node, made)
        request = _request(node, f"{seen.epoch}:{batch}", news, tags, chosen)
        while _consumed_before(context, node, batch, request):
            # A lost cursor starts again at epoch 0: Dagster would ignore a run key that it has seen.
            seen = seen.model_copy(update={"epoch": seen.epoch + 1})
            context.update_cursor(seen.text)
            request = _request(node, f"{seen.epoch}:{batch}", news, tags, chosen)
        failed = _run_of(context, {_RUN_KEY: str(request.run_key)}, _FAILED)
        if failed:
            return dg.SkipReason(
                f"{news.description}: the run {failed} of this input did not succeed, and the same "
                "input is requested once; re-execute that run, or materialize the asset. More input is "
                "requested together with this one"
            )
        return dg.SensorResult([request])

    return sense


class _WithoutPartitions(dg.AssetSelection):
    """The assets of a selection that a run without a partition can make, with those of the same ops.

    Dagster makes one job of a sensor's target when definitions load, and refuses different partitions
    and assets without an op in it.
    """

    def __init__(self, wanted: dg.AssetSelection) -> None:
        self._wanted = wanted

    def resolve_inner(self, asset_graph: Any, allow_missing: bool) -> set[dg.AssetKey]:
        executable = self.executable(asset_graph, allow_missing)
        return executable - partitioned(asset_graph, executable)

    def executable(self, asset_graph: Any, allow_missing: bool = False) -> set[dg.AssetKey]:
        """Returns the assets with an op, also those with partitions."""
        selection = self._wanted.required_multi_asset_neighbors()
        chosen = selection.resolve_inner(asset_graph, allow_missing=allow_missing)
        return {key for key in chosen if asset_graph.get(key).is_executable}

    def resolve_checks_inner(self, asset_graph: Any, allow_missing: bool) -> set[dg.AssetCheckKey]:
        """Returns the checks of the selection, and all of the assets that it gets in addition."""
        wanted, chosen = self._wanted.resolve(asset_graph), self.resolve(asset_graph)
        checks, gone, added = self._wanted.resolve_checks(asset_graph), wanted - chosen, chosen - wanted
        return {
            check
            for check in asset_graph.asset_check_keys
            if check.asset_key in added or (check in checks and check.asset_key not in gone)
        }


def partitioned(graph: Any, chosen: Collection[dg.AssetKey]) -> set[dg.AssetKey]:
    """Returns those of some assets that a run without a partition cannot make: assets with partitions,
    those of the same ops, and the assets downstream of these."""
    found = set[dg.AssetKey]()
    more = {key for key in chosen if graph.get(key).partitions_def is not None}
    while more != found:
        found = more
        below = dg.AssetSelection.assets(*found).downstream().required_multi_asset_neighbors()
        more = {*below.resolve(graph)}
    return {*chosen} & found


def _assets_of_run(
    context: dg.SensorEvaluationContext, node: Stream, made: _WithoutPartitions
) -> list[dg.AssetKey] | None:
    """Returns the assets that a requested run makes; None = all that the sensor's target selects.

    Raises:
        TopologyError: the selection lacks the asset that reads the source.
    """
    if context.repository_def is None:  # a test calls the sensor without one
        return None
    graph, key = context.repository_def.asset_graph, dg.AssetKey(node.path)
    chosen = made.executable(graph)
    if key not in chosen:
        raise TopologyError(
            f"{node.name}: expected the target of its sensor to contain the asset "
            f"{key.to_user_string()}, which reads the new input, got "
            f"{', '.join(sorted(one.to_user_string() for one in chosen)) or 'no asset'}; add "
            f"dg.AssetSelection.assets({key.to_user_string()!r}) to target, or leave target out"
        )
    kept = made.resolve(graph)
    return sorted(kept) if kept != chosen else None


def _request(
    node: Stream, place: str, news: News, tags: Mapping[str, str], chosen: Sequence[dg.AssetKey] | None
) -> dg.RunRequest:
    """Returns a run request for new input; the run key is the same for the same input."""
    digest = hashlib.sha256((json.dumps(news.config) + news.content).encode()).hexdigest()[:16]
    return dg.RunRequest(
        run_key=f"{'/'.join(node.path)}:{place}:{digest}",
        run_config={"ops": {asset_op(node): {"config": news.config}}},
        tags=tags,
        asset_selection=chosen,
    )


def _consumed_before(
    context: dg.SensorEvaluationContext, node: Stream, batch: int, request: dg.RunRequest
) -> bool:
    """Whether a run has consumed the input of a request, and the table went back since: it was removed,
    or restored from a backup.

    Args:
        batch: the table's last one.
    """
    run_id = _run_of(context, {_RUN_KEY: str(request.run_key)}, [dg.DagsterRunStatus.SUCCESS])
    if run_id is None:
        return False
    event = context.instance.get_latest_materialization_event(dg.AssetKey(node.path))
    made = None if event is None else event.asset_materialization
    if made is not None:
        return (reported_batch(made) or 0) > batch
    # No event: the materializations were wiped, or the run was of other assets and has no such step.
    return bool(step_events(context, node, run_id, dg.DagsterEventType.STEP_SUCCESS))


def _after_failures(
    context: dg.SensorEvaluationContext, tags: Mapping[str, str], seconds: int
) -> str | None:
    """Returns why a request has to wait: several runs for this batch of the asset have failed, and each
    time the input had changed. The second failure doubles the interval of the sensor, each other one
    doubles it again, up to an hour; a table that fails on a busy topic would fail at each tick.

    Args:
        tags: of the asset and the batch.
        seconds: the interval of the sensor.
    """
    failed = _records_of(context, tags, [dg.DagsterRunStatus.FAILURE], _MOST_FAILURES)
    if len(failed) < 2:
        return None
    ended = failed[0].end_time or failed[0].update_timestamp.timestamp()
    until = ended + min(seconds * 2 ** (len(failed) - 1), _LONGEST_WAIT)
    if time.time() >= until:
        return None
    last = failed[0].dagster_run.run_id
    return (
        f"{len(failed)} runs for this batch have failed, the last one is {last}; "
        f"the next one is requested from {in_utc(round(until) * 1_000_000)} on. To run at once, "
        "re-execute that run, or materialize the asset"
    )


def _run_of(
    context: dg.SensorEvaluationContext, tags: Mapping[str, str], statuses: list[dg.DagsterRunStatus]
) -> str | None:
    """Returns the newest run with these tags and one of these statuses; None = there is none."""
    found = _records_of(context, tags, statuses, 1)
    return found[0].dagster_run.run_id if found else None


def _records_of(
    context: dg.SensorEvaluationContext,
    tags: Mapping[str, str],
    statuses: list[dg.DagsterRunStatus],
    most: int,
) -> Sequence[dg.RunRecord]:
    """Returns the newest runs with these tags and one of these statuses, at most so many."""
    try:
        instance = context.instance
    except dg.DagsterInvariantViolationError:  # a test calls the sensor without one
        return []
    return instance.get_run_records(dg.RunsFilter(tags=dict(tags), statuses=statuses), limit=most)


class _Cursor(BaseModel):
    """The state of a sensor; losing it does no harm."""

    epoch: int = 0
    """Incremented whenever the table went back to an earlier batch, as after a replay."""
    batch: int
    """The table's last batch."""
    since: int | None = None
    """When a tick first saw the waiting input (epoch seconds); None = nothing waits."""

    @classmethod
    def read(cls, cursor: str | None, batch: int, waiting: bool) -> "_Cursor":
        try:
            seen = cls.model_validate_json(cursor or "")
        except ValidationError:  # lost, or written by another sensor
            seen = cls(batch=batch)
        since = (seen.since if seen.batch == batch else None) or round(time.time())
        epoch = seen.epoch + (1 if batch < seen.batch else 0)
        return cls(epoch=epoch, batch=batch, since=since if waiting else None)

    @property
    def text(self) -> str:
        return self.model_dump_json(exclude_none=True)


# Partition sensor


_PARTITION_PAGE, _AT_ONCE = 1000, 500
_UNKNOWN = "unknown"
"""The reason for a partition whose reads are unknown. It is requested once, whatever the run results
in."""
_WHY = "vt_dagster/why"


@check_arguments()
def build_partition_sensor(
    report: dg.AssetsDefinition,
    *,
    reads: Stream,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    running: bool = False,
    resource_prefix: str = PREFIX,
) -> dg.SensorDefinition:
    """Returns a sensor that requests the stale partitions of an asset: late records, corrections or
    deletions of a table changed the rows valid at the time that the partitions read.

    The asset reads the table as of the end of its partition (``"vt_dagster/as_of": "partition_end"``),
    or as of another time. A partition is stale if a record committed after the position that its last
    materialization read changes an interval that contains the partition's read time: from the record's
    timestamp (inclusive) to the next version's (exclusive). So an update of the newest version requests
    no partition that ended before it. No other partition would change, except for ``valid_to`` of
    versions that ended since, after its time.

    Partitions that were never materialized are not requested. If another log replaced the one that a
    partition read (replay and swap, restate), the partition is stale if the logs differ at its time in
    keys, values or ``valid_from``. Erased rows make partitions stale that may have read them. If this
    cannot be decided (no position in the metadata, as in earlier releases; the old log is gone, or the
    log was truncated after the position), the partition is requested once, and the tick's log has a
    warning. A partition whose time is before the table's history cannot be recomputed; the tick's log
    warns of it too.

    The run key derives from the partition's last materialization and the last record that made it
    stale, so it is requested once, at any number of ticks, and even if that run fails. The cursor only
    saves repeated work: a lost one requests nothing twice. Needs no Spark. A process reads all
    materializations once; each tick reads the new ones.

    Args:
        report: an asset with partitions that has the table as an input. Its downstream assets are not
            requested: give them an automation condition.
        reads: the versioned table.
        name: None = ``<report>_partitions_of_<reads>``.
        running: whether the sensor is on from the start.
        resource_prefix: as in :func:`build_asset`; needs only the warehouse resource.

    Raises:
        TopologyError: the asset is a graph or has no partitions, does not read the table as of a time,
            or reads it as of the end of a partition that is not one of time.
    """
    key, partitions, inputs = _require_reader(report, reads)
    table = "/".join(reads.path)
    named = name or f"{report.key.to_python_identifier()}_partitions_of_{reads.name}"
    known = _Materializations(key, inputs, table)

    @dg.sensor(
        name=named,
        target=dg.AssetSelection.assets(key),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description=f"Runs partitions of {key.to_user_string()} that {reads.name} has made wrong.",
        required_resource_keys={warehouse_key(resource_prefix)},
    )
    def sense(context: dg.SensorEvaluationContext, **_: Any) -> dg.SensorResult | dg.SkipReason:
        warehouse = warehouse_of(context, resource_prefix)
        try:
            head = head_of(warehouse, table)
        except (StorageError, OSError) as error:
            return dg.SkipReason(f"cannot look at {reads.name}: {error}")
        position = Position.after(head[1])
        made, last = known.made(context.instance)
        cursor = _PartitionCursor.of(context.cursor)
        now = _PartitionCursor(position=position, storage_id=last)
        if cursor == now:
            return dg.SkipReason(f"nothing new in {reads.name}: {_position_text(head[1])}")
        wrong = _stale_partitions(warehouse, head, made, cursor)
        there = set(partitions.get_partition_keys(dynamic_partitions_store=context.instance))
        wrong = {partition: why for partition, why in wrong.items() if partition in there}
        wrong = known.only_there(context.instance, wrong)
        _warn_of_partitions(context, key.to_user_string(), reads.name, wrong)
        # Dagster ignores a repeated run key: one request per partition and reason.
        requests = [
            dg.RunRequest(f"{named}:{one}:{why.why}:{why.by}", partition_key=one, tags={_WHY: why.why})
            for one, why in sorted(wrong.items())
            if not why.forgotten
        ]
        if not requests:
            context.update_cursor(now.model_dump_json())
            return dg.SkipReason(
                f"no partition of {len(made)} is wrong: {reads.name} has {_position_text(head[1])}"
            )
        reasons = Counter(request.tags[_WHY] for request in requests)
        context.log.info(", ".join(f"{count} {why}" for why, count in reasons.items()))
        return dg.SensorResult(requests, cursor=now.model_dump_json())

    return sense


def _require_reader(
    report: dg.AssetsDefinition, reads: Stream
) -> tuple[dg.AssetKey, dg.PartitionsDefinition[Any], list[str]]:
    """Returns the key of an asset, its partitions, and its inputs that read a table as of a time."""
    key, path = next(iter(report.keys)), "/".join(reads.path)
    named = key.to_user_string()
    if len(report.keys) != 1 or report.partitions_def is None:
        what = f"{len(report.keys)} assets" if len(report.keys) != 1 else "one without"
        raise TopologyError(
            f"{named}: expected one asset with partitions that a sensor can request, got {what}; give "
            "it a partitions_def such as dagster.DailyPartitionsDefinition"
        )
    if not isinstance(report.node_def, dg.OpDefinition):
        raise TopologyError(
            f"{named}: expected an asset of one op, got a graph asset, whose inputs have no metadata "
            "in Dagster; read the table in an asset of its own, before the graph"
        )
    if not isinstance(reads, VersionedTable):
        materialized = "materialized=Materialized(history_retention=...)"
        if hasattr(reads.operator, "materialized"):
            history = f"declare it with {materialized}"
        elif not reads.is_table or reads.operator is not None:
            stream = "to_stream(name=...)." * reads.is_table
            history = f"read {stream}to_table(name=..., {materialized}) of it"
        else:
            history = "declare its history_retention"
        raise TopologyError(
            f"{named}: expected a versioned table in reads, got the {type(reads).__name__} "
            f"{reads.name!r}, which has no history; {history}"
        )
    require_readable(named, Consumer.PARTITION_SENSOR, reads)
    found = [one for one, up in report.keys_by_input_name.items() if up == dg.AssetKey(reads.path)]
    metadata = {one.name: one.metadata or {} for one in report.node_def.input_defs}
    wanted = [
        one
        for one in found
        if AS_OF in metadata[one]
        and AS_KNOWN_AT not in metadata[one]
        and metadata[one].get(READ, "current") == "current"
    ]
    if not wanted:
        got = [dict(metadata[one]) for one in found] or "no such input"
        raise TopologyError(
            f"{named}: expected an input that reads {path} as of a time, without {AS_KNOWN_AT}, "
            f'got {got}; give it dagster.AssetIn(metadata={{"{AS_OF}": "partition_end"}}). Only '
            "such a read can become stale: a read as known at a time never changes, and a read of the "
            "current rows changes with each run"
        )
    until_end = [one for one in wanted if metadata[one][AS_OF] == PARTITION_END]
    if until_end and not _of_time(report.partitions_def):
        raise TopologyError(
            f"{named}: expected partitions by one time, since {until_end[0]} reads {path} as of "
            f"{PARTITION_END!r}, got a {type(report.partitions_def).__name__}; give it a "
            "partitions_def such as dagster.DailyPartitionsDefinition, or set a time to read as of"
        )
    return key, report.partitions_def, wanted


def _of_time(partitions: dg.PartitionsDefinition[Any]) -> bool:
    """Whether a partition ends at one time: of several dimensions, exactly one is a window of time."""
    multi = isinstance(partitions, dg.MultiPartitionsDefinition)
    dimensions = [one.partitions_def for one in partitions.partitions_defs] if multi else [partitions]
    return sum(isinstance(one, dg.TimeWindowPartitionsDefinition) for one in dimensions) == 1


# --------------------------------------------------------------------- Dagster's materializations


@dataclass(frozen=True)
class _Made:
    """The last materialization of a partition.

    Args:
        reads: its reads of the table as of a time; empty: unknown.
    """

    storage_id: int
    reads: list[Read]


class _Materializations:
    """The last materialization of each partition of an asset, cached in this process.

    Dagster has no query for only the last ones with their metadata. So all are read once, and then the
    newer ones; the last one read shows whether the storage is still the same.
    """

    def __init__(self, key: dg.AssetKey, inputs: Sequence[str], table: str) -> None:
        self._key, self._inputs, self._table = key, inputs, table
        self._made = dict[str, _Made]()
        self._last: tuple[int, float] | None = None

    def made(self, instance: dg.DagsterInstance) -> tuple[Mapping[str, _Made], int]:
        """Returns the last materializations by partition, and the storage id of the newest of them; 0 =
        none."""
        if self._last is not None and not self._read(instance, self._last[0] - 1):
            self._made, self._last = {}, None
        if self._last is None:
            self._read(instance, 0)
        return self._made, 0 if self._last is None else self._last[0]

    def _read(self, instance: dg.DagsterInstance, after: int) -> bool:
        """Reads the materializations after a storage id; returns whether the first of them is the one
        that was read last."""
        place, wanted = None, dg.AssetRecordsFilter(self._key, after_storage_id=after)
        expected = self._last
        while True:
            page = instance.fetch_materializations(
                wanted, limit=_PARTITION_PAGE, cursor=place, ascending=True
            )
            for record in page.records:
                found = record.storage_id, record.timestamp
                if expected not in (None, found):
                    return False
                expected, self._last, partition = None, found, record.partition_key
                if partition is not None:
                    reads = _reads(record, self._inputs, self._table)
                    self._made[partition] = _Made(record.storage_id, reads)
            if not page.has_more:
                return expected is None
            place = page.cursor

    def only_there(
        self, instance: dg.DagsterInstance, wrong: dict[str, StaleRead]
    ) -> dict[str, StaleRead]:
        """Returns only the partitions whose last materialization has not been wiped since."""
        ids = {self._made[partition].storage_id: partition for partition in wrong}
        in_order, there = sorted(ids), set[str]()
        for start in range(0, len(in_order), _AT_ONCE):
            some = in_order[start : start + _AT_ONCE]
            wanted = dg.AssetRecordsFilter(self._key, storage_ids=some)
            found = instance.fetch_materializations(wanted, limit=_AT_ONCE).records
            there |= {ids[record.storage_id] for record in found}
        for partition in wrong.keys() - there:
            del self._made[partition]
        return {partition: why for partition, why in wrong.items() if partition in there}


def _reads(record: dg.EventLogRecord, inputs: Sequence[str], table: str) -> list[Read]:
    event = record.asset_materialization
    entry = None if event is None else event.metadata.get(READS)
    value: Any = {} if entry is None else entry.value
    reads = [Read.model_validate(value[one]) for one in inputs if one in value]
    return [read for read in reads if read.asset == table and read.as_of is not None]


# ------------------------------------------------------------------------------ stale partitions


def _stale_partitions(
    warehouse: str, head: tuple[int, Commit], made: Mapping[str, _Made], cursor: "_PartitionCursor"
) -> dict[str, StaleRead]:
    """Returns the stale partitions with their reasons."""
    every = [(partition, one, read) for partition, one in made.items() for read in one.reads]
    looked = [cursor.seen(one, read, head[1].log) for _, one, read in every]
    found = stale_reads(warehouse, head, looked)
    wrong = {
        partition: StaleRead(_UNKNOWN, "", False) for partition, one in made.items() if not one.reads
    }
    for (partition, one, _), why in zip(every, found, strict=True):
        before = wrong.get(partition)
        if why is not None and not (before is not None and before.forgotten):
            wrong[partition] = why._replace(by=f"{one.storage_id}:{why.by}")
    return wrong


def _position_text(commit: Commit) -> str:
    return f"batch {commit.batch}, {counted(commit.total, 'record')}"


def _warn_of_partitions(
    context: dg.SensorEvaluationContext, asset: str, table: str, wrong: Mapping[str, StaleRead]
) -> None:
    """Warns in the tick's log about partitions that cannot be recomputed, or may or may not be
    stale."""
    gone = sorted(partition for partition, why in wrong.items() if why.forgotten)
    if gone:
        context.log.warning(
            f"{asset}: {counted(len(gone), 'partition')} may be stale, with times before "
            f"the history of {table}: {', '.join(gone[:10])}"
        )
    unsure = Counter(one.why for one in wrong.values() if one.why in UNDECIDABLE and not one.forgotten)
    for why, count in unsure.items():
        context.log.warning(
            f"{asset}: {counted(count, 'partition is', 'partitions are')} requested, because it is "
            f"unknown whether {table} made them stale: {UNDECIDABLE[why]}"
        )


class _PartitionCursor(BaseModel):
    """The progress of a sensor; losing it does no harm."""

    position: Position | None = None
    """Of the table's log."""
    storage_id: int = 0
    """Up to which materialization."""

    @classmethod
    def of(cls, text: str | None) -> "_PartitionCursor":
        try:
            return cls.model_validate_json(text or "")
        except ValidationError:  # lost, or written by another sensor
            return cls()

    def seen(self, made: _Made, read: Read, log: str) -> Read:
        """Returns a read with its position advanced to the last one that the sensor checked.

        Args:
            log: the id of the table's current log.
        """
        upto = self.position
        if upto is None or made.storage_id > self.storage_id:
            return read
        newer = upto.batch > read.batch if upto.log == read.log else read.log != log
        return read.looked_at(upto) if newer else read
