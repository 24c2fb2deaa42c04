"""An asset check with a limit on how far stream time is behind the clock."""

import time
from datetime import timedelta
from typing import Any

import dagster as dg

from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.metadata import as_time
from vt_dagster.orchestration.resources import PREFIX, warehouse_key, warehouse_of
from vt_dagster.storage.arrow_reader import head_of
from vt_dagster.topology.durations import in_utc, spoken
from vt_dagster.topology.model import Stream

NAME = "is_fresh"


def build_freshness_check(
    node: Stream,
    *,
    at_most: timedelta,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetChecksDefinition:
    """Returns a check that fails if the newest record is older than a limit: if stream time, the
    largest timestamp of all partitions, is further behind the clock. Needs no Spark; it does not block.

    Dagster's ``FreshnessPolicy`` uses the time of the last materialization instead: a run today with
    records of last week does not make a table fresh, and a run without new records does not make it
    stale.

    Args:
        node: any stream or table.
        at_most: the limit, inclusive.
        severity: of a failure.
        pool, resource_prefix: as in :func:`build_checks`.

    Raises:
        TopologyError: the limit is not positive.
    """
    if at_most <= timedelta(0):
        raise TopologyError(
            f"{node.name}: expected at_most to be a positive timedelta, got {at_most!r}; set the "
            "maximum age of its newest record, for example timedelta(hours=2)"
        )
    key = dg.AssetKey(node.path)

    @dg.asset_check(
        asset=key,
        name=NAME,
        description=f"The newest record is at most {spoken(at_most)} old.",
        pool=pool,
        required_resource_keys={warehouse_key(resource_prefix)},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        _, commit = head_of(warehouse_of(context, resource_prefix), "/".join(node.path))
        newest, told = max(commit.stream_time.values(), default=None), dict[str, Any]()
        passed, limit = False, at_most.total_seconds()
        said = "there is no record yet"
        if newest is not None:
            age = time.time() - newest / 1e6
            passed = age <= limit
            said = f"the newest record is of {in_utc(newest)}"
            told = {"stream_time": as_time(newest), "age_seconds": round(age, 3)}
        context.log.info(f"{node.name}: {said}")
        return dg.AssetCheckResult(
            asset_key=key,
            check_name=NAME,
            passed=passed,
            severity=severity,
            description=f"{said[0].upper()}{said[1:]}; it may be {spoken(at_most)} old.",
            metadata={**told, "at_most_seconds": limit},
        )

    return check
