"""Alerts: limits on streams and tables as asset checks, and a sensor that sends each breach once.

The checks are ordinary ones of Dagster, which runs and a schedule evaluate. The sensor only reads their
results from Dagster's event storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import dagster as dg

from vt_dagster.core.arrival_order import Outcome
from vt_dagster.errors import TopologyError, counted
from vt_dagster.orchestration.checks import (
    build_freshness_check,
    build_lateness_check,
    build_quarantine_check,
    build_waiting_check,
    counts,
    why_not_counted,
)
from vt_dagster.orchestration.resources import PREFIX
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_arguments

_HISTORY = 20
"""Number of results of a check that a tick reads. With more results between two ticks, the sensor may
miss that the check has passed in between."""
_PLAIN = (
    dg.BoolMetadataValue,
    dg.FloatMetadataValue,
    dg.IntMetadataValue,
    dg.TextMetadataValue,
    dg.TimestampMetadataValue,
)


@dataclass(frozen=True)
class Alert:
    """A breach of a limit, as sent.

    Args:
        asset: the key of the asset, like ``shop/prices``.
        check: the name of the asset check that failed, like ``is_fresh``.
        text: what was found and what is allowed, one sentence.
        severity: ``"ERROR"`` or ``"WARN"``.
        at: when the check was evaluated, in UTC.
        run_id: the Dagster run that evaluated it.
        values: the numbers and texts of the check's metadata, by name; times are epoch seconds.
    """

    asset: str
    check: str
    text: str
    severity: str
    at: datetime
    run_id: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @property
    def key(self) -> str:
        """The limit that is broken, ``prices:is_fresh``: the same in each breach."""
        return f"{self.asset}:{self.check}"


@check_arguments("to", "freshness", "waiting", "severity")
def build_alerts(
    nodes: Stream | Sequence[Stream],
    *,
    to: Callable[[Alert], object],
    freshness: timedelta | None = None,
    late_share: str | float | None = None,
    quarantine_share: str | float | None = None,
    waiting: int | None = None,
    name: str = "alerts",
    cron_schedule: str = "*/15 * * * *",
    minimum_interval_seconds: int = 60,
    running: bool = False,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.Definitions:
    """Returns asset checks for limits on streams and tables, and a sensor that sends an alert when one
    fails.

    A limit is checked for each node to which it applies. The checks run with each run of their asset;
    a schedule also runs those of freshness, since a table ages without a run. None of them blocks or
    needs Spark.

    Each breach is sent once, and again only after the check has passed in between. If ``to`` raises,
    the tick fails, and the next one tries again. If the same tick has sent other alerts, it logs the
    error and succeeds, so that Dagster keeps its cursor and these are not sent twice; the next tick
    then fails. A tick that is killed while it sends may send an alert twice. Failed runs are not sent:
    use Dagster's ``run_failure_sensor``.

    Args:
        to: is called with each :class:`Alert`; in YAML ``my_project.alerts:send``.
        freshness: maximum age of the newest record (inclusive), see :func:`build_freshness_check`.
        late_share: maximum share of results that late records have made wrong, like ``"0.1%"``, see
            :func:`build_lateness_check`.
        quarantine_share: maximum share of bad records in a run, like ``"1%"``, see
            :func:`build_quarantine_check`.
        waiting: maximum number of records that wait in a grace period, see
            :func:`build_waiting_check`.
        name: of the sensor; of the schedule and its job ``<name>_freshness``.
        cron_schedule: when freshness is checked; default every quarter of an hour.
        running: whether the sensor and the schedule are on from the start.
        severity: of failed checks.
        pool, resource_prefix: as in :func:`build_asset`.

    Raises:
        TopologyError: ``to`` cannot be called, there is no limit, or a limit applies to no node.
        StorageError: a share is invalid.
    """
    if not callable(to):
        raise TopologyError(
            f"{name}: expected a function that takes an Alert (to), got {to!r}; give one that sends it"
        )
    nodes = [nodes] if isinstance(nodes, Stream) else nodes
    how: Any = {"severity": severity, "pool": pool, "resource_prefix": resource_prefix}
    limits: dict[str, tuple[Any, Callable[..., dg.AssetChecksDefinition], Callable[[Stream], bool]]] = {
        "freshness": (freshness, build_freshness_check, lambda _: True),
        "late_share": (late_share, build_lateness_check, lambda node: why_not_counted(node) is None),
        "quarantine_share": (
            quarantine_share,
            build_quarantine_check,
            lambda node: counts(node, Outcome.QUARANTINED),
        ),
        "waiting": (waiting, build_waiting_check, lambda node: counts(node, Outcome.WAITING)),
    }
    made: dict[str, list[dg.AssetChecksDefinition]] = {}
    for limit, (value, build, applies) in limits.items():
        if value is None:
            continue
        made[limit] = [build(node, at_most=value, **how) for node in nodes if applies(node)]
        if not made[limit]:
            raise TopologyError(
                f"{name}: expected streams or tables to which {limit} applies, got "
                f"{[node.name for node in nodes]}; remove {limit}, or add the asset that it is for"
            )
    checks = [check for some in made.values() for check in some]
    if not checks:
        raise TopologyError(
            f"{name}: expected a limit, got none; set one or more of {', '.join(limits)}"
        )
    on: Any = dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
    jobs, schedules = list[Any](), list[dg.ScheduleDefinition]()
    if "freshness" in made:
        job = dg.define_asset_job(
            f"{name}_freshness",
            dg.AssetSelection.checks(*made["freshness"]),
            tags={"vt_dagster/alerts": name},
        )
        jobs.append(job)
        schedules.append(
            dg.ScheduleDefinition(
                name=job.name, job=job, cron_schedule=cron_schedule, default_status=on
            )
        )
    sensor = _sensor(name, checks, to, minimum_interval_seconds, running)
    return dg.Definitions(asset_checks=checks, jobs=jobs, schedules=schedules, sensors=[sensor])


# Sensor


def _sensor(
    name: str,
    checks: Sequence[dg.AssetChecksDefinition],
    to: Callable[[Alert], object],
    minimum_interval_seconds: int,
    running: bool,
) -> dg.SensorDefinition:
    specs = {spec.key: spec for check in checks for spec in check.check_specs}

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description=f"Watches {counted(len(specs), 'asset check')}, and sends an alert when one fails.",
    )
    def sense(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        sent, still = _cursor(context.cursor), dict[str, int]()
        delivered, errors = list[str](), list[Exception]()
        for key, spec in specs.items():
            place = f"{key.asset_key.to_user_string()}:{key.name}"
            results = _results(context.instance, key)
            before = sent.get(place)
            if not results:
                still |= {} if before is None else {place: before}
                continue
            last = results[0]
            if last.evaluation.passed:
                continue
            passed_since = any(r.evaluation.passed and r.id > (before or 0) for r in results)
            # A smaller id than before is one of another storage: its results are new.
            if before is None or before > last.id or passed_since:
                try:
                    to(_alert(place, spec, last))
                except Exception as error:
                    context.log.exception(f"{place}: the alert could not be sent")
                    errors.append(error)
                    still |= {} if before is None else {place: before}
                    continue
                delivered.append(place)
            still[place] = last.id
        if errors and not delivered:
            raise errors[0]
        # A tick that fails would lose its cursor, and send again what it has sent.
        context.update_cursor(json.dumps(still))
        later = f"; {len(errors)} could not be sent, the next tick tries again" if errors else ""
        if delivered:
            return dg.SkipReason(
                f"sent {counted(len(delivered), 'alert')}: {', '.join(delivered)}{later}"
            )
        return dg.SkipReason(f"no new breach; {len(still)} known: {', '.join(still) or 'none'}")

    return sense


def _results(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> list[Any]:
    """Returns Dagster's records of the last results of a check, newest first, without those of
    evaluations that are not finished."""
    records = instance.event_log_storage.get_asset_check_execution_history(key, limit=_HISTORY)
    return [one for one in records if isinstance(one.evaluation, dg.AssetCheckEvaluation)]


def _alert(place: str, spec: dg.AssetCheckSpec, result: Any) -> Alert:
    found: dg.AssetCheckEvaluation = result.evaluation
    values = {name: one.value for name, one in found.metadata.items() if isinstance(one, _PLAIN)}
    text = found.description or values.get("result") or spec.description or f"{place} failed"
    return Alert(
        asset=found.asset_key.to_user_string(),
        check=found.check_name,
        text=str(text),
        severity=found.severity.value,
        at=datetime.fromtimestamp(result.create_timestamp, tz=timezone.utc),
        run_id=result.run_id,
        values=values,
    )


def _cursor(text: str | None) -> dict[str, int]:
    """Returns the id of the last failed result by check that was sent; a lost cursor sends again."""
    try:
        found: Any = json.loads(text or "{}")
        return {str(place): int(number) for place, number in found.items()}
    except (ValueError, TypeError, AttributeError):  # written by another sensor
        return {}
