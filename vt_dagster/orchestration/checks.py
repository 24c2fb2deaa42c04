"""Asset checks: one ``multi_asset_check`` per table, blocking, with a sample of offending rows."""

import time
from collections.abc import Iterator
from typing import Any

import dagster as dg

from vt_dagster.orchestration.resource import SparkResource, WarehouseResource
from vt_dagster.runs.audit import Finding, audit, checks_of
from vt_dagster.storage.store import AssetStore
from vt_dagster.topology.model import Stream


def build_checks(node: Stream) -> dg.AssetChecksDefinition:
    """The checks of an asset's committed tables.

    They are blocking: where one fails, what is downstream in the same run is held. A failing check
    does not undo the commit; the checks before it (op types and contract) prevent one.
    """
    key = dg.AssetKey(node.name)
    promises = {check.name: check.promise for check in checks_of(node)}
    specs = [
        dg.AssetCheckSpec(name, asset=key, blocking=True, description=promise)
        for name, promise in promises.items()
    ]

    @dg.multi_asset_check(specs=specs, name=f"check_{node.name}", can_subset=True)
    def check(
        context: dg.AssetCheckExecutionContext, spark: SparkResource, warehouse: WarehouseResource
    ) -> Iterator[dg.AssetCheckResult]:
        started = time.monotonic()
        chosen = {check.name for check in context.selected_asset_check_keys}
        store = AssetStore(warehouse.path, node, spark.spark_session)
        found = [one for one in audit(store, context.run.run_id) if one.name in chosen]
        for one in found:
            if not one.passed:
                context.log.error(
                    f"{node.name}: expected that {promises[one.name]}, got {one.offending:,} offending "
                    f"row(s): see the sample of the check {one.name}"
                )
        passed, seconds = sum(one.passed for one in found), time.monotonic() - started
        context.log.info(f"{node.name}: {passed} of {len(found)} checks passed ({seconds:.1f} s)")
        for one in found:
            yield _result(one, key)

    return check


def _result(finding: Finding, key: dg.AssetKey) -> dg.AssetCheckResult:
    metadata: dict[str, Any] = {
        "offending_rows": finding.offending,
        "looked_at": finding.looked_at,
        **finding.numbers,
    }
    if finding.sample:
        metadata["sample"] = dg.MetadataValue.table(
            [dg.TableRecord({k: str(v) for k, v in row.items()}) for row in _aligned(finding.sample)]
        )
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=finding.name,
        passed=finding.passed,
        severity=dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
    )


def _aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column, as Dagster's tables want it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in names} for row in rows]
