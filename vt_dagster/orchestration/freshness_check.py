"""An asset check with a limit: how far stream time may be behind the clock."""

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
    """An asset check that fails where the newest record is older than a limit: where stream time, the
    largest timestamp of all partitions, is further behind the clock. Without Spark; it does not block.

    When a run was last made, which Dagster's ``FreshnessPolicy`` goes by, tells something else: a run
    today that took in what was true last week makes no table fresh, and one that finds nothing new does
    not make it stale.

    Args:
        node: any stream or table.
        at_most: exactly so old is fresh.
        severity: of a failure.
        pool, resource_prefix: as of :func:`build_checks`.

    Raises:
        TopologyError: the limit is none.
    """
    if at_most <= timedelta(0):
        raise TopologyError(
            f"{node.name}: expected at_most to be a length of time, got {at_most!r}; say how old its "
            "newest record may be, for example timedelta(hours=2)"
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
