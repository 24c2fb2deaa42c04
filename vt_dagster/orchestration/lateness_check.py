"""An asset check with a budget for results that are wrong because of late records."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import dagster as dg

from vt_dagster.drawing import image
from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.resources import PREFIX, warehouse_key, warehouse_of
from vt_dagster.provenance.lateness import Choice, Lateness, lateness, parse_share, picture, share
from vt_dagster.topology.durations import spoken
from vt_dagster.topology.model import Stream
from vt_dagster.topology.windows import HoppingWindow, TumblingWindow

NAME = "few_results_are_wrong"


def build_lateness_check(
    node: Stream,
    *,
    at_most: str | float,
    grace: Sequence[str | timedelta] = (),
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetChecksDefinition:
    """Returns a check that fails if more results are wrong than a budget allows: wrong joins, windows
    that lack records, rejected records. It suggests the shortest grace period or history
    retention within the budget, shows the cost of others, and does not block. Needs no Spark.

    Args:
        node: a join of a stream with a versioned table, an aggregate by tumbling or hopping windows,
            or a versioned table.
        at_most: the budget, like ``"0.1%"`` or 0.001.
        grace: the grace periods or history retentions to compare, see :func:`vt_dagster.lateness`.
        severity: of a failure.
        pool, resource_prefix: as in :func:`build_checks`.

    Raises:
        TopologyError: no record can be late for the node.
        StorageError: the budget is invalid.
    """
    _require_a_length(node)
    parse_share(at_most)
    key = dg.AssetKey(node.path)

    @dg.asset_check(
        asset=key,
        name=NAME,
        description=f"At most {at_most} of the results are wrong because of late records.",
        pool=pool,
        required_resource_keys={warehouse_key(resource_prefix)},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        started = time.monotonic()
        warehouse = warehouse_of(context, resource_prefix)
        found = lateness(node, grace=grace, at_most=at_most, warehouse=warehouse)
        metadata = _metadata(found)
        context.log.info(
            f"{node.name}: {metadata['result'].value} ({time.monotonic() - started:.1f} s)"
        )
        return dg.AssetCheckResult(
            asset_key=key,
            check_name=NAME,
            passed=found.passed,
            severity=severity,
            metadata=metadata,
        )

    return check


def _require_a_length(node: Stream) -> None:
    operator: Any = node.operator
    fixed = isinstance(getattr(operator, "window", None), TumblingWindow | HoppingWindow)
    about = {} if operator is None else operator.meaning
    waits = about.get("operator") == "StreamTableJoin" and "as_known" not in about
    waits = waits and all(one.versioned for one in node.inputs[1:])
    if not (fixed or waits or node.versioned):
        raise TopologyError(
            f"{node.name}: expected a join of a stream with a versioned table, an aggregate by "
            "tumbling or hopping windows, or a versioned table, got one for which no record is "
            "late; remove the check"
        )


def _metadata(found: Lateness) -> dict[str, Any]:
    one, what = found.declared, found.what.replace("_", " ")
    assert found.at_most is not None
    told: dict[str, Any] = {"at_most": found.at_most}
    if one is None:
        told["result"] = dg.MetadataValue.text(f"the {what} is unknown, or differs by partition")
    else:
        told["result"] = dg.MetadataValue.text(
            f"with a {what} of {spoken(one.length)} {one.wrong:,} of {one.of:,} results are wrong "
            f"({share(one.share)}), allowed: {share(found.at_most)}"
        )
        told |= {"wrong": one.wrong, "of": one.of, "share": one.share}
    if found.suggested is not None:
        told[f"suggested_{found.what}_seconds"] = found.suggested.total_seconds()
        told["suggestion"] = dg.MetadataValue.text(f"a {what} of {spoken(found.suggested)}")
    if found.notes:
        told["notes"] = dg.MetadataValue.text("\n".join(found.notes))
    told["choices"] = dg.MetadataValue.table([dg.TableRecord(_row(one)) for one in found.choices])
    told["picture"] = dg.MetadataValue.md(image("lateness", picture(found)))
    return told


def _row(one: Choice) -> dict[str, Any]:
    row: dict[str, Any] = {
        "length": spoken(one.length),
        "of": one.of,
        "wrong": one.wrong,
        "share": share(one.share),
        "late": one.late,
    }
    more = {
        "updates dropped": one.dropped,
        "wrong because expired": one.expired,
        "waiting on average": one.waiting_average,
        "waiting at most": one.waiting_most,
        "later, p50": None if one.later is None else str(one.later.p50),
        "later, p99": None if one.later is None else str(one.later.p99),
    }
    return row | {name: value for name, value in more.items() if value is not None}
