"""A sensor that asks for those partitions of a user's asset that a table has made wrong since."""

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
"""Why a partition is asked for, of which nobody knows what it has read: once, whatever comes of it."""
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
    """A sensor that asks for the partitions of an asset that are wrong now: late records, corrections
    or deletions of a table have changed what was true at the time that they looked at.

    The asset reads the table as of the end of its partition (``"vt_dagster/as_of": "partition_end"``),
    or as of another time. A partition is wrong if a record that was committed after the position that
    its last materialization has read changes an interval that holds the time that it read: from the
    record's timestamp (inclusive) to the next version's (exclusive). So an update of the newest
    version asks for none that ended before it. No other partition would come out otherwise, but for
    ``valid_to`` of versions that have ended since, after its time.

    Partitions that were never materialized are not asked for. Where another log has taken the place of
    the one that a partition has read (replay and swap, restate), it is wrong if the two say different
    things of its time: other keys, values or ``valid_from``. Rows that were erased make wrong what may
    have seen them. Where nobody can tell (the position is not in the metadata, as in releases before;
    the old log is not there any more, or the log was cut off after the position) a partition is asked
    for once, since it may be wrong, and the tick's log says so. One whose time the table's history does
    not reach back to cannot be made again, and is told of there too.

    A run's key follows from the partition's last materialization and the last record that made it
    wrong, so that it is asked for once, however often a tick looks, and also where that run fails. The
    cursor only saves looking at what was looked at: a lost one asks for nothing twice. Without Spark.
    What materializations say is read once by a process; a tick reads those that are new.

    Args:
        report: an asset with partitions that has the table as an input. What is downstream of it is
            not asked for: give that an automation condition.
        reads: the versioned table.
        name: None = ``<report>_partitions_of_<reads>``.
        running: whether the sensor is on from the start.
        resource_prefix: as of :func:`build_asset`; of the resources it needs the warehouse.

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
    """The key of an asset, its partitions, and its inputs that read a table as of a time.

    Raises:
        TopologyError: there are none.
    """
    key, path = next(iter(report.keys)), "/".join(reads.path)
    named = key.to_user_string()
    if len(report.keys) != 1 or report.partitions_def is None:
        what = f"{len(report.keys)} assets" if len(report.keys) != 1 else "one without"
        raise TopologyError(
            f"{named}: expected one asset with partitions that a sensor can ask for, got {what}; give "
            "it a partitions_def such as dagster.DailyPartitionsDefinition"
        )
    if not isinstance(reads, VersionedTable):
        raise TopologyError(
            f"{named}: expected a versioned table in reads, got the {type(reads).__name__} "
            f"{reads.name!r}, which remembers nothing; declare its history_retention"
        )
    if reads.new_version_on is not None:
        raise TopologyError(
            f"{named}: expected a table whose every record makes a version in reads, got "
            f"{reads.name!r} with new_version_on={list(reads.new_version_on)}: a late record may "
            "change what is true behind the next record too, which their times do not tell; leave "
            "new_version_on out, or ask for partitions by a schedule"
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
            f"{named}: expected an input that reads {path} as of a time by all that is known of it, "
            f'got {got}; give it dagster.AssetIn(metadata={{"{AS_OF}": "partition_end"}}). What is '
            "read as it was known at a time does not change, and what is read as of now always does"
        )
    return key, report.partitions_def, wanted


# ------------------------------------------------------------------------- what Dagster knows


@dataclass(frozen=True)
class _Made:
    """The last materialization of a partition.

    Args:
        reads: what it has read of the table as of a time; none: nobody knows.
    """

    storage_id: int
    reads: list[Read]


class _Materializations:
    """The last materialization of each partition of an asset, as far as this process has read them.

    Dagster has no way to ask for the last ones alone with their metadata. So all are read once, and
    then those that came after; the last one that was read says whether it is still the same storage.
    """

    def __init__(self, key: dg.AssetKey, inputs: Sequence[str], table: str) -> None:
        self._key, self._inputs, self._table = key, inputs, table
        self._made = dict[str, _Made]()
        self._last: tuple[int, float] | None = None

    def made(self, instance: dg.DagsterInstance) -> tuple[Mapping[str, _Made], int]:
        """By partition; and the storage id of the last one, of any partition; 0 = there is none."""
        if self._last is not None and not self._read(instance, self._last[0] - 1):
            self._made, self._last = {}, None
        if self._last is None:
            self._read(instance, 0)
        return self._made, 0 if self._last is None else self._last[0]

    def _read(self, instance: dg.DagsterInstance, after: int) -> bool:
        """Reads those after one; whether the first of them is the last that was read before."""
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
        """Those of which the last materialization was not wiped meanwhile."""
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


# ------------------------------------------------------------------------- what is wrong


def _wrong(
    warehouse: str, head: tuple[int, Commit], made: Mapping[str, _Made], cursor: "_Cursor"
) -> dict[str, StaleRead]:
    """By partition, why it is wrong."""
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
    """A run of a partition; one and the same while the same makes it wrong."""
    key = f"{sensor}:{partition}:{why.why}:{why.by}"
    return dg.RunRequest(run_key=key, partition_key=partition, tags={_WHY: why.why})


def _standing(commit: Commit) -> str:
    return f"batch {commit.batch}, {commit.total:,} records"


def _tell(
    context: dg.SensorEvaluationContext, asset: str, table: str, wrong: Mapping[str, StaleRead]
) -> None:
    """Says in the tick's log of which partitions nobody can tell, and which cannot be made again."""
    gone = sorted(partition for partition, why in wrong.items() if why.forgotten)
    if gone:
        context.log.warning(
            f"{asset}: {len(gone)} partition(s) may be wrong, but the history of {table} does not "
            f"reach back to their time: {', '.join(gone[:10])}"
        )
    unsure = Counter(one.why for one in wrong.values() if one.why in UNDECIDABLE and not one.forgotten)
    for why, count in unsure.items():
        context.log.warning(
            f"{asset}: {count} partition(s) are asked for, and nobody can tell if {table} has made "
            f"them wrong: {UNDECIDABLE[why]}"
        )


@dataclass(frozen=True)
class _Cursor:
    """Up to where a sensor has looked; it may be lost.

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
        except (ValueError, KeyError, TypeError):  # lost, or not ours
            return cls()

    @property
    def text(self) -> str:
        position = None if self.position is None else self.position.model_dump()
        return json.dumps({"position": position, "storage_id": self.storage_id})

    def seen(self, made: _Made, read: Read, log: str) -> Read:
        """A read, as if it had been made where a sensor has looked at it last.

        Args:
            log: which one is the table's now.
        """
        upto = self.position
        if upto is None or made.storage_id > self.storage_id:
            return read
        newer = upto.batch > read.batch if upto.log == read.log else read.log != log
        return read.looked_at(upto) if newer else read
