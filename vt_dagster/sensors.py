"""Sensors: ask for a run where a source has something new, with what the run is to take."""

import hashlib
import json

import dagster as dg

from vt_dagster.errors import SourceError, VtDagsterError
from vt_dagster.model import Stream
from vt_dagster.ops import files_source
from vt_dagster.resource import WarehouseResource
from vt_dagster.storage.store import AssetStore


def build_sensor(
    node: Stream,
    *,
    target: dg.AssetSelection | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    running: bool = False,
) -> dg.SensorDefinition:
    """A sensor that asks for a run when a source's directory has files that were not consumed.

    The truth is the position in the asset's last commit; the cursor only says what was asked for
    last. The run's config names the files, and the run key follows from them, from the batch that
    they come after, and from an epoch that the cursor counts: the same files are asked for once, and
    again where the table has gone back since (a replay). A lost cursor or a doubled tick asks for
    nothing twice; a run that finds its files consumed commits nothing.

    Args:
        target: what to run; None = the asset and everything downstream of it.
        running: whether the sensor is on from the start.
    """
    source = files_source(node)
    selection = target or dg.AssetSelection.assets(dg.AssetKey(node.name)).downstream()

    @dg.sensor(
        name=name or f"{node.name}_sensor",
        target=selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description=f"Runs when there are new {source.describe()}.",
    )
    def sense(
        context: dg.SensorEvaluationContext, warehouse: WarehouseResource
    ) -> dg.SensorResult | dg.SkipReason:
        store = AssetStore(warehouse.path, node)
        try:
            head = store.head()
            pending = source.pending(store.consumed_files(head))
        except (SourceError, OSError) as error:
            return dg.SkipReason(f"cannot look at {source.describe()}: {error}")
        except VtDagsterError as error:
            return dg.SkipReason(str(error))
        batch = 0 if head is None else head.commit.batch
        epoch = _epoch(context.cursor, batch)
        cursor = json.dumps({"epoch": epoch, "batch": batch})
        if not pending:
            context.update_cursor(cursor)  # else a table that goes back from here is not noticed
            consumed = 0 if head is None else head.commit.totals.get("in", 0)
            return dg.SkipReason(
                f"no new {source.describe()}: batch {batch}, {consumed} records consumed"
            )
        names = [f.name for f in pending]
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
        run_key = f"{node.name}:{epoch}:{batch}:{digest}"
        config = {"ops": {node.name: {"ops": {f"read_{node.name}": {"config": {"files": names}}}}}}
        request = dg.RunRequest(
            run_key=run_key,
            run_config=config,
            tags={"vt_dagster/asset": node.name, "vt_dagster/batch": str(batch + 1)},
        )
        return dg.SensorResult(run_requests=[request], cursor=cursor)

    return sense


def _epoch(cursor: str | None, batch: int) -> int:
    """One more each time that a table has gone back, which is a replay on purpose."""
    try:
        seen = json.loads(cursor or "")
        return seen["epoch"] + (1 if batch < seen["batch"] else 0)
    except (ValueError, KeyError, TypeError):  # lost, or not ours
        return 0
