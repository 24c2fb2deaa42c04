"""A sensor that requests the partitions of a user's asset that late changes of a table made stale."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.orchestration.io_manager import AS_KNOWN_AT, AS_OF, READ, READS
from vt_dagster.orchestration.resources import PREFIX, warehouse_key, warehouse_of
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.stale_reads import UNDECIDABLE, Position, Read, StaleRead, stale_reads
from vt_dagster.topology.model import Stream, VersionedTable

_PAGE, _AT_ONCE = 1000, 500
_UNKNOWN = "unknown"
"""The reason for a partition whose reads are unknown: it is requested once, whatever its run gives."""
_WHY = "vt_dagster/why"


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
        TopologyError: the asset has no partitions, or does not read the table as of a time.
    """
    key, partitions, inputs = _require_reader(report, reads)
    table, named = "/".join(reads.path), name or _name(report.key, reads)
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
        cursor, now = _Cursor.of(context.cursor), _Cursor(position, last)
        if cursor == now:
            return dg.SkipReason(f"nothing new in {reads.name}: {_standing(head[1])}")
        wrong = _wrong(warehouse, head, made, cursor)
        there = set(partitions.get_partition_keys(dynamic_partitions_store=context.instance))
        wrong = {partition: why for partition, why in wrong.items() if partition in there}
        wrong = known.only_there(context.instance, wrong)
        _tell(context, key.to_user_string(), reads.name, wrong)
        requests = [
            _request(named, partition, why)
            for partition, why in sorted(wrong.items())
            if not why.forgotten
        ]
        if not requests:
            context.update_cursor(now.text)
            return dg.SkipReason(
                f"no partition of {len(made)} is wrong: {reads.name} has {_standing(head[1])}"
            )
        told = Counter(request.tags[_WHY] for request in requests)
        context.log.info(", ".join(f"{count} {why}" for why, count in told.items()))
        return dg.SensorResult(requests, cursor=now.text)

    return sense


def _name(key: dg.AssetKey, reads: Stream) -> str:
    return f"{key.to_python_identifier()}_partitions_of_{reads.name}"


def _require_reader(
    report: dg.AssetsDefinition, reads: Stream
) -> tuple[dg.AssetKey, dg.PartitionsDefinition[Any], list[str]]:
    """Returns the key of an asset, its partitions, and its inputs that read a table as of a time.

    Raises:
        TopologyError: the asset has no partitions or no such input.
    """
    key, path = next(iter(report.keys)), "/".join(reads.path)
    named = key.to_user_string()
    if len(report.keys) != 1 or report.partitions_def is None:
        what = f"{len(report.keys)} assets" if len(report.keys) != 1 else "one without"
        raise TopologyError(
            f"{named}: expected one asset with partitions that a sensor can request, got {what}; give "
            "it a partitions_def such as dagster.DailyPartitionsDefinition"
        )
    if not isinstance(reads, VersionedTable):
        raise TopologyError(
            f"{named}: expected a versioned table in reads, got the {type(reads).__name__} "
            f"{reads.name!r}, which has no history; declare its history_retention"
        )
    if reads.new_version_on is not None:
        raise TopologyError(
            f"{named}: expected a table whose every record makes a version in reads, got "
            f"{reads.name!r} with new_version_on={list(reads.new_version_on)}: a late record may "
            "change versions after the next record too, which the timestamps do not show; remove "
            "new_version_on, or request partitions with a schedule"
        )
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
            f'got {got}; give it dagster.AssetIn(metadata={{"{AS_OF}": "partition_end"}}). A read '
            "as known at a time never changes, and a read as of now always does"
        )
    return key, report.partitions_def, wanted


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
        """Returns them by partition, and the storage id of the last one of any partition; 0 = none."""
        if self._last is not None and not self._read(instance, self._last[0] - 1):
            self._made, self._last = {}, None
        if self._last is None:
            self._read(instance, 0)
        return self._made, 0 if self._last is None else self._last[0]

    def _read(self, instance: dg.DagsterInstance, after: int) -> bool:
        """Reads those after a storage id; returns whether the first is the one that was read last."""
        place, wanted = None, dg.AssetRecordsFilter(self._key, after_storage_id=after)
        expected = self._last
        while True:
            page = instance.fetch_materializations(wanted, limit=_PAGE, cursor=place, ascending=True)
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
        """Returns the partitions whose last materialization was not wiped meanwhile."""
        ids = {self._made[partition].storage_id: partition for partition in wrong}
        asked, there = sorted(ids), set[str]()
        for start in range(0, len(asked), _AT_ONCE):
            some = asked[start : start + _AT_ONCE]
            wanted = dg.AssetRecordsFilter(self._key, storage_ids=some)
            found = instance.fetch_materializations(wanted, limit=_AT_ONCE).records
            there |= {ids[record.storage_id] for record in found}
        for partition in wrong.keys() - there:
            del self._made[partition]
        return {partition: why for partition, why in wrong.items() if partition in there}


def _reads(record: dg.EventLogRecord, inputs: Sequence[str], table: str) -> list[Read]:
    event = record.asset_materialization
    told = None if event is None else event.metadata.get(READS)
    value: Any = {} if told is None else told.value
    reads = [Read.model_validate(value[one]) for one in inputs if one in value]
    return [read for read in reads if read.asset == table and read.as_of is not None]


# ------------------------------------------------------------------------------ stale partitions


def _wrong(
    warehouse: str, head: tuple[int, Commit], made: Mapping[str, _Made], cursor: "_Cursor"
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


def _request(sensor: str, partition: str, why: StaleRead) -> dg.RunRequest:
    """Returns a run request for a partition; the run key is the same while the reason is."""
    key = f"{sensor}:{partition}:{why.why}:{why.by}"
    return dg.RunRequest(run_key=key, partition_key=partition, tags={_WHY: why.why})


def _standing(commit: Commit) -> str:
    return f"batch {commit.batch}, {commit.total:,} records"


def _tell(
    context: dg.SensorEvaluationContext, asset: str, table: str, wrong: Mapping[str, StaleRead]
) -> None:
    """Warns in the tick's log of partitions that are undecidable or cannot be recomputed."""
    gone = sorted(partition for partition, why in wrong.items() if why.forgotten)
    if gone:
        context.log.warning(
            f"{asset}: {len(gone)} partition(s) may be stale, but their time is before the "
            f"history of {table}: {', '.join(gone[:10])}"
        )
    unsure = Counter(one.why for one in wrong.values() if one.why in UNDECIDABLE and not one.forgotten)
    for why, count in unsure.items():
        context.log.warning(
            f"{asset}: {count} partition(s) are requested, because it is unknown whether {table} "
            f"made them stale: {UNDECIDABLE[why]}"
        )


@dataclass(frozen=True)
class _Cursor:
    """The progress of a sensor; losing it does no harm.

    Args:
        position: of the table's log.
        storage_id: up to which materialization.
    """

    position: Position | None = None
    storage_id: int = 0

    @classmethod
    def of(cls, text: str | None) -> "_Cursor":
        try:
            told = json.loads(text or "")
            return cls(Position.model_validate(told["position"]), int(told["storage_id"]))
        except (ValueError, KeyError, TypeError):  # lost, or written by another sensor
            return cls()

    @property
    def text(self) -> str:
        position = None if self.position is None else self.position.model_dump()
        return json.dumps({"position": position, "storage_id": self.storage_id})

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
