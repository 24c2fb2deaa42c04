"""Asset checks: of committed data, of freshness, of late records, and of the last run's counts.

- Committed data: one ``multi_asset_check`` per table, blocking, with a sample of offending rows.
- Freshness: a limit on how far stream time is behind the clock.
- Late records: a budget for results that are wrong because of them.
- Counts of the last run: limits on bad records and on records that wait.
"""

import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import dagster as dg

from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_order import follows_source
from vt_dagster.drawing import image
from vt_dagster.errors import TopologyError, counted
from vt_dagster.orchestration.metadata import as_time
from vt_dagster.orchestration.resources import (
    PREFIX,
    check_op,
    expect_few_rows,
    keys_of,
    node_of_op,
    require_key,
    stores_for,
    warehouse_key,
    warehouse_of,
)
from vt_dagster.provenance.expressions import plain
from vt_dagster.provenance.lateness import (
    Choice,
    Lateness,
    lateness,
    parse_lengths,
    parse_share,
    picture,
    share,
)
from vt_dagster.runs.audit import Finding, audit, checks_of
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import head_of, require_in_place
from vt_dagster.topology.durations import in_utc, spoken
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import Consumer, check_arguments, refused_option
from vt_dagster.topology.specification import WindowedAggregateSpec

# Checks


_PLANNED = "PLANNED"
_NOTHING = "nothing: the tables have not changed since the check last passed"


@check_arguments()
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
    # Without a description: `dg list defs` has four letters a line for it, beside these names. The
    # asset's metadata and each result have the promise.
    specs = [dg.AssetCheckSpec(name, asset=key, blocking=True) for name in promises]

    @dg.multi_asset_check(
        specs=specs,
        name=check_op(node),
        can_subset=True,
        pool=pool,
        required_resource_keys=keys_of(resource_prefix),
    )
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        started = time.monotonic()
        require_key(node, (check.asset_key for check in context.selected_asset_check_keys))
        chosen = {check.name for check in context.selected_asset_check_keys}
        store = stores_for(context, resource_prefix)(node)
        versions = store.versions()
        if _passed_before(context, key, versions):
            context.log.info(f"{node.name}: nothing new since its checks passed")
            found = [Finding(name, 0, [], looked_at=_NOTHING) for name in promises if name in chosen]
        else:
            head = store.head()
            expect_few_rows(context, resource_prefix, node, 0 if head is None else head.commit.total)
            found = [one for one in audit(store, context.run.run_id) if one.name in chosen]
        for one in found:
            if not one.passed:
                context.log.error(
                    f"{node.name}: expected that {promises[one.name]}, got "
                    f"{counted(one.offending, 'offending row')}: see the sample of the check {one.name}"
                )
        passed, seconds = sum(one.passed for one in found), time.monotonic() - started
        of = counted(len(found), "check")
        context.log.info(f"{node.name}: {passed} of {of} passed ({seconds:.1f} s)")
        for one in found:
            yield _result(one, promises[one.name], key, versions)

    node_of_op(check.node_def, node, resource_prefix)
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
        last = next((one for one in known if one.status.value != _PLANNED), None)
        evaluation = None if last is None else last.evaluation
        if evaluation is None or not evaluation.passed:
            return False
        checked = evaluation.metadata.get("versions")
        if checked is None or checked.value != versions:
            return False
    return True


def _result(
    finding: Finding, promise: str, key: dg.AssetKey, versions: Mapping[str, int]
) -> dg.AssetCheckResult:
    metadata: dict[str, Any] = {
        "offending_rows": finding.offending,
        "looked_at": finding.looked_at,
        "versions": dict(versions),
        **finding.numbers,
    }
    if finding.sample:
        metadata["sample"] = _table([{k: str(v) for k, v in row.items()} for row in finding.sample])
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=finding.name,
        passed=finding.passed,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"Expected: {promise}.",
        metadata=metadata,
    )


def _table(rows: list[dict[str, Any]]) -> dg.TableMetadataValue:
    names = dict.fromkeys(name for row in rows for name in row)
    # Dagster's tables require all columns in each row.
    records = [dg.TableRecord({name: row.get(name, "") for name in names}) for row in rows]
    return dg.MetadataValue.table(records)


# Freshness check


FRESHNESS_CHECK = "is_fresh"


@check_arguments("at_most", "severity")
def build_freshness_check(
    node: Stream,
    *,
    at_most: timedelta,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetChecksDefinition:
    """Returns a check that fails if the newest record is older than a limit, or if there is no record
    yet. The newest record is that with the largest timestamp of all partitions; its age is compared
    with the clock. The check needs no Spark and does not block.

    Dagster's ``FreshnessPolicy`` uses the time of the last materialization instead: a run today with
    records of last week does not make a table fresh, and a run without new records does not make it
    stale.

    Args:
        node: any stream or table.
        at_most: the limit, inclusive.
        severity: of a failure.
        pool, resource_prefix: as in :func:`build_asset`.

    Raises:
        TopologyError: the limit is not positive.
    """
    if not isinstance(at_most, timedelta) or at_most <= timedelta(0):
        raise TopologyError(
            f"{node.name}: expected at_most to be a positive timedelta, got {at_most!r}; set the "
            "maximum age of its newest record, for example timedelta(hours=2)"
        )

    def found(context: dg.AssetCheckExecutionContext, warehouse: str) -> dict[str, Any]:
        name, stream_time = "/".join(node.path), dict[int, int]()
        if delta.exists(posixpath.join(warehouse, name, "log")):
            stream_time = head_of(warehouse, name)[1].stream_time
        else:  # it has never run: the check fails, so that an alert is sent
            require_in_place(warehouse, name)
        newest, metadata = max(stream_time.values(), default=None), dict[str, Any]()
        passed, limit = False, at_most.total_seconds()
        text = "there is no record yet"
        if newest is not None:
            age = time.time() - newest / 1e6
            passed = age <= limit
            text = f"the newest record is from {in_utc(newest)}"
            metadata = {"stream_time": as_time(newest), "age_seconds": round(age, 3)}
        context.log.info(f"{node.name}: {text}")
        return {
            "passed": passed,
            "description": f"{text[0].upper()}{text[1:]}; the maximum age is {spoken(at_most)}.",
            "metadata": {**metadata, "at_most_seconds": limit},
        }

    text = f"The newest record is at most {spoken(at_most)} old."
    return _not_blocking(node, FRESHNESS_CHECK, text, found, severity, pool, resource_prefix)


_Found = Callable[[dg.AssetCheckExecutionContext, str], dict[str, Any]]
"""Returns the fields of a check's result, for the warehouse."""


def _not_blocking(
    node: Stream,
    name: str,
    description: str,
    found: _Found,
    severity: dg.AssetCheckSeverity,
    pool: str | None,
    resource_prefix: str,
) -> dg.AssetChecksDefinition:
    """Returns a check that needs no Spark and does not block."""
    key = dg.AssetKey(node.path)
    if not isinstance(severity, dg.AssetCheckSeverity):
        raise TopologyError(
            f"{node.name}: expected severity to be a dagster.AssetCheckSeverity, got {severity!r}; set "
            "for example AssetCheckSeverity.WARN"
        )

    @dg.asset_check(
        asset=key,
        name=name,
        description=description,
        pool=pool,
        required_resource_keys={warehouse_key(resource_prefix)},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        require_key(node, (check.asset_key for check in context.selected_asset_check_keys))
        fields = found(context, warehouse_of(context, resource_prefix))
        return dg.AssetCheckResult(asset_key=key, check_name=name, severity=severity, **fields)

    return check


# Checks of the last run's counts


QUARANTINE_CHECK = "few_records_are_quarantined"
WAITING_CHECK = "few_records_wait"


def counts(node: Stream, outcome: str) -> bool:
    """Returns whether the runs of a stream or table count an outcome of records."""
    return outcome in processor_of(node).plan().counts.shown


@check_arguments("severity")
def build_quarantine_check(
    node: Stream,
    *,
    at_most: str | float,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetChecksDefinition:
    """Returns a check that fails if too large a share of the last run's records is bad: unreadable, or
    without a key or timestamp. It passes if that run had no records. Needs no Spark; it does not block.

    A source's ``max_bad_share`` instead fails the run before its commit. Late records are not bad: see
    :func:`build_lateness_check`.

    Args:
        node: a stream or table with a source.
        at_most: the limit (inclusive), like ``"0.1%"`` or 0.001.
        severity: of a failure.
        pool, resource_prefix: as in :func:`build_asset`.

    Raises:
        TopologyError: the node has no source.
        StorageError: the limit is no share.
    """
    limit = parse_share(at_most)
    assert limit is not None
    if not counts(node, Outcome.QUARANTINED):
        raise TopologyError(
            f"{node.name}: expected a stream or table with a source, got the result of an operator, "
            "which quarantines no bad records; check its inputs instead"
        )

    def result(found: Mapping[str, int]) -> tuple[bool, str, dict[str, Any]]:
        bad, total = found.get(Outcome.QUARANTINED, 0), found.get("in", 0)
        actual = bad / total if total else 0.0
        text = f"Bad records of the last run: {bad:,} of {total:,} ({share(actual)})"
        numbers = {"quarantined": bad, "of": total, "share": actual, "at_most": limit}
        return actual <= limit, f"{text}, allowed: {share(limit)}.", numbers

    text = f"At most {at_most} of the records of the last run are bad."
    found = _of_last_run(node, result)
    return _not_blocking(node, QUARANTINE_CHECK, text, found, severity, pool, resource_prefix)


@check_arguments("at_most", "severity")
def build_waiting_check(
    node: Stream,
    *,
    at_most: int,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    pool: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetChecksDefinition:
    """Returns a check that fails if too many records wait after the last run: buffered by the grace
    period of a join until stream time passes. Needs no Spark; it does not block.

    Args:
        node: a join of a stream with a table, or of two streams.
        at_most: the limit, a number of records (inclusive).
        severity: of a failure.
        pool, resource_prefix: as in :func:`build_asset`.

    Raises:
        TopologyError: no record waits for the node, or the limit is negative.
    """
    if not counts(node, Outcome.WAITING):
        raise TopologyError(
            f"{node.name}: expected a join of a stream with a table, or of two streams, in which "
            "records can wait, got another asset; remove the check"
        )
    if not isinstance(at_most, int) or isinstance(at_most, bool) or at_most < 0:
        raise TopologyError(
            f"{node.name}: expected at_most to be a number of records from 0 on, got {at_most!r}; set "
            "how many may wait"
        )

    def result(found: Mapping[str, int]) -> tuple[bool, str, dict[str, Any]]:
        waiting = found.get(Outcome.WAITING, 0)
        text = f"Records that wait after the last run: {waiting:,}, allowed: {at_most:,}."
        return waiting <= at_most, text, {"waiting": waiting, "at_most": at_most}

    text = f"At most {counted(at_most, 'record waits', 'records wait')}."
    found = _of_last_run(node, result)
    return _not_blocking(node, WAITING_CHECK, text, found, severity, pool, resource_prefix)


def _of_last_run(
    node: Stream, result: Callable[[Mapping[str, int]], tuple[bool, str, dict[str, Any]]]
) -> _Found:
    def found(context: dg.AssetCheckExecutionContext, warehouse: str) -> dict[str, Any]:
        _, commit = head_of(warehouse, "/".join(node.path))
        passed, text, numbers = result(commit.counts)
        context.log.info(f"{node.name}: {text}")
        return {"passed": passed, "description": text, "metadata": numbers}

    return found


# Lateness check


LATENESS_CHECK = "few_results_are_wrong"


@check_arguments("severity")
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
        pool, resource_prefix: as in :func:`build_asset`.

    Raises:
        TopologyError: no record can be late for the node, ``lateness`` cannot count its results, or a
            length in ``grace`` is negative or too long.
        StorageError: the budget is invalid.
        ContractError: a text in ``grace`` is not a length.
    """
    why = why_not_counted(node)
    if why is not None:
        raise TopologyError(
            f"{node.name}: expected a join of a stream with a versioned table, an aggregate by "
            f"tumbling or hopping windows, or a versioned table, got one {why}; remove the check"
        )
    parse_share(at_most)
    lengths = parse_lengths(node.name, grace)

    def found(context: dg.AssetCheckExecutionContext, warehouse: str) -> dict[str, Any]:
        started = time.monotonic()
        result = lateness(node, grace=lengths, at_most=at_most, warehouse=warehouse)
        metadata = _metadata(result)
        told = metadata["result"].value
        context.log.info(f"{node.name}: {told} ({time.monotonic() - started:.1f} s)")
        described = f"{told[0].upper()}{told[1:]}."
        return {"passed": result.passed, "description": described, "metadata": metadata}

    text = f"At most {at_most} of the results are wrong because of late records."
    return _not_blocking(node, LATENESS_CHECK, text, found, severity, pool, resource_prefix)


def why_not_counted(node: Stream) -> str | None:
    """Returns why ``lateness`` counts no results of a stream or table; None = it counts them."""
    operator = None if node.operator is None else node.operator.specification
    tables = node.inputs[1:]
    if operator is None or operator.lateness_option is None:
        tables, can_be_late = (), node.versioned and not follows_source(node)
    else:
        can_be_late = all(one.versioned for one in tables)
    unsupported = None if operator is None else operator.lateness_unsupported
    if unsupported is not None:
        first = unsupported.why.partition(". ")[0]
        return f"whose wrong results its log does not show: {first[0].lower()}{first[1:]}"
    if not can_be_late:
        return "for which no record is late"
    if isinstance(operator, WindowedAggregateSpec):
        columns = node.inputs[0].schema.names
        made = [str(one) for one in operator.group_key if plain(one.sql, columns) is None]
        return f"by {', '.join(made)}, which needs Spark" if made else None
    for table in tables:
        refused = refused_option(Consumer.LATENESS, table)
        if refused is not None:
            return f"with {table.name}, which has {refused.option}: {refused.refusal.why}"
    return None


def _metadata(found: Lateness) -> dict[str, Any]:
    one, what = found.declared, found.what.replace("_", " ")
    assert found.at_most is not None
    metadata: dict[str, Any] = {"at_most": found.at_most}
    if one is None:
        metadata["result"] = dg.MetadataValue.text(f"the {what} is unknown, or differs by partition")
    else:
        metadata["result"] = dg.MetadataValue.text(
            f"with a {what} of {spoken(one.length)} {one.wrong:,} of "
            f"{counted(one.of, 'result is', 'results are')} wrong ({share(one.share)}), allowed: "
            f"{share(found.at_most)}"
        )
        metadata |= {"wrong": one.wrong, "of": one.of, "share": one.share}
    if found.suggested is not None:
        metadata[f"suggested_{found.what}_seconds"] = found.suggested.total_seconds()
        metadata["suggestion"] = dg.MetadataValue.text(f"a {what} of {found.suggestion}")
    if found.notes:
        metadata["notes"] = dg.MetadataValue.text("\n".join(found.notes))
    metadata["choices"] = _table([_row(one) for one in found.choices])
    metadata["picture"] = dg.MetadataValue.md(image("lateness", picture(found)))
    return metadata


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
