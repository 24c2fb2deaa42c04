"""Asset checks: one ``multi_asset_check`` per table, blocking, with a sample of offending rows."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from vt_dagster.orchestration.resources import PREFIX, keys_of, stores_for
from vt_dagster.runs.audit import Finding, audit, checks_of
from vt_dagster.topology.model import Stream

_PLANNED = "PLANNED"
_NOTHING = "nothing: the tables have not changed since the check last passed"


def build_checks(
    node: Stream, *, pool: str | None = None, resource_prefix: str = PREFIX
) -> dg.AssetChecksDefinition:
    """Returns the checks of an asset's committed tables.

    They are blocking: if one fails, downstream assets in the same run do not start. A failing check
    does not undo the commit; the contract, checked before the commit, can prevent it. In a run without
    new records, checks that passed on these table versions are not run again.
    """
    key = dg.AssetKey(node.path)
    promises = {check.name: check.promise for check in checks_of(node)}
    specs = [
        dg.AssetCheckSpec(name, asset=key, blocking=True, description=promise)
        for name, promise in promises.items()
    ]

    @dg.multi_asset_check(
        specs=specs,
        name=f"check_{key.to_python_identifier()}",
        can_subset=True,
        pool=pool,
        required_resource_keys=keys_of(resource_prefix),
    )
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        started = time.monotonic()
        chosen = {check.name for check in context.selected_asset_check_keys}
        store = stores_for(context, resource_prefix)(node)
        versions = store.versions()
        if _passed_before(context, key, versions):
            context.log.info(f"{node.name}: nothing new since its checks passed")
            found = [Finding(name, 0, [], looked_at=_NOTHING) for name in promises if name in chosen]
        else:
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
            yield _result(one, key, versions)

    return check


def _passed_before(
    context: dg.AssetCheckExecutionContext, key: dg.AssetKey, versions: Mapping[str, int]
) -> bool:
    """Whether this run had no new records, and all chosen checks have passed on these versions of the
    tables. Without an observation of this run (checks alone were requested) the checks run again."""
    seen = context.instance.fetch_observations(key, limit=1).records
    if not seen or seen[0].run_id != context.run.run_id:
        return False
    storage = context.instance.event_log_storage
    for chosen in context.selected_asset_check_keys:
        known = storage.get_asset_check_execution_history(chosen, limit=10)
        last = next((one.event for one in known if one.status.value != _PLANNED), None)
        event = None if last is None else last.dagster_event
        evaluation = event.asset_check_evaluation_data if event else None
        if evaluation is None or not evaluation.passed:
            return False
        told = evaluation.metadata.get("versions")
        if told is None or told.value != versions:
            return False
    return True


def _result(finding: Finding, key: dg.AssetKey, versions: Mapping[str, int]) -> dg.AssetCheckResult:
    metadata: dict[str, Any] = {
        "offending_rows": finding.offending,
        "looked_at": finding.looked_at,
        "versions": dict(versions),
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
    """Returns the rows with all columns in each, as Dagster's tables require."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in names} for row in rows]
