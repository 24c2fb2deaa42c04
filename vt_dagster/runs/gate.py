"""The gate before a commit: invariants, pandera's checks and the share of bad records, in one pass.

**Invariants** of tables with validity intervals and of logs. A check is a function ``(frame, *,
parameters) -> bool``, as pandera calls it; ``vt_dagster.contracts`` registers all of them with pandera.
Gates and asset checks count the underlying conditions (:class:`Rule`), many in one pass.

Intervals are half open: ``valid_from`` is inclusive, ``valid_to`` exclusive, and a null ``valid_to``
means that the version is current. Both may be TIMESTAMP, DATE or any other orderable type. All null
keys count as one key.

**pandera checks.** pandera's own ``validate`` runs a Spark job per check. Most checks have one shape,
though: *no row passes this filter*, perhaps over columns that the check adds first. This module records
each check's filter and added columns, and counts all of them in a single aggregate. A check of any
other shape runs as pandera runs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias
from zlib import crc32

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import NullType, StructType
from pyspark.sql.window import WindowSpec

from vt_dagster.columns import (
    ARRIVAL,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core.arrival_order import (
    CHUNK,
    LAST_BLOCK,
    MOST_BLOCKS,
    REFUSED,
    Outcome,
    arrival_block,
    by_partition,
    with_columns,
)
from vt_dagster.core.processor import ResultOrder, RunPlan
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_order import follows_source
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, START, Reason, as_json
from vt_dagster.core.versioned_table import is_refused
from vt_dagster.errors import ContractError, TopologyError, counted
from vt_dagster.sources.base import Pinned
from vt_dagster.sources.text_formats import hint_of
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import pandera_schema
from vt_dagster.topology.schema import same

# Invariants


Names: TypeAlias = str | Sequence[str]


@dataclass(frozen=True)
class Rule:
    """An invariant of rows.

    Args:
        name: of the invariant.
        violated: true for an offending row; false or null for any other.
        columns: further columns that the condition needs, by name. Equal names stand for equal
            expressions, so that several rules share them.
        of: the column that it is about; empty: the whole row.
        warns: whether a run only warns of offending rows (pandera's ``raise_warning``).
    """

    name: str
    violated: Column
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])
    of: str = ""
    warns: bool = False


def _none_in(frame: Any, violated: Column, columns: Mapping[str, Column] = {}) -> bool:
    return with_columns(frame, dict(columns)).where(violated).limit(1).count() == 0


def _names(key: Names) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _column(column: str | Column) -> Column:
    """Returns a column by name; a name with dots is a field of a struct."""
    if not isinstance(column, str):
        return column
    return F.col(column) if "." in column else F.col(f"`{column}`")


def _of_key(key: Names) -> WindowSpec:
    return W.partitionBy(*map(_column, _names(key)))


def _helper(what: str, *parts: Any) -> str:
    """Returns one name per expression, so that two checks with the same parameters share a window."""
    return f"{what}#{crc32(repr(parts).encode()):08x}"


def shown_as(helper: str) -> str:
    """Returns the name under which samples show a column of ``Rule.columns``."""
    return helper.partition("#")[0]


def _following(key: Names, valid_from: str, valid_to: str) -> tuple[Column, dict[str, Column]]:
    """Returns the ``valid_from`` of the key's next version, and the window expression that adds it."""
    order = [_column(valid_from), _column(valid_to).asc_nulls_last()]
    following = F.lead(_column(valid_from)).over(_of_key(key).orderBy(*order))
    name = _helper("next_valid_from", _names(key), valid_from, valid_to)
    return _column(name), {name: following}


def expired(horizon: Column, valid_to: str) -> Column:
    """Returns the condition on versions that break :func:`nothing_older_than_retention`.

    Args:
        horizon: start of the history; a version that ended at or before it has expired.
    """
    return _column(valid_to) <= horizon


def decreasing(key: Names, timestamp: str, order: Sequence[str | Column], among: Column | None) -> Rule:
    """Returns the invariant :func:`timestamps_do_not_decrease`.

    Args:
        among: the rows to compare; None = all.
    """
    counted = _column(timestamp) if among is None else F.when(among, _column(timestamp))
    columns = [*map(_column, order)]
    earlier = _of_key(key).orderBy(*columns).rowsBetween(W.unboundedPreceding, -1)
    name = _helper("newest_before", _names(key), timestamp, *map(str, columns), str(among))
    newest = F.max(counted).over(earlier)
    return Rule("timestamps_do_not_decrease", counted < _column(name), {name: newest})


def repeated_results(key: Names, order: Sequence[str | Column]) -> Rule:
    """Returns the invariant :func:`one_result_per_window`; the results after the first one offend."""
    columns = [*map(_column, order)]
    name = _helper("release", _names(key), *map(str, columns))
    release = F.row_number().over(_of_key(key).orderBy(*columns))
    return Rule("one_result_per_window", _column(name) > 1, {name: release})


# ---------------------------------------------------------------------------------------- checks


def versions_do_not_overlap(
    frame: DataFrame, *, key: Names, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """No version of a key ends after the key's next version begins.

    A current version ends after every other one. ``one_version_per_key_and_timestamp`` covers two
    versions with the same ``valid_from``.

    Args:
        key: one or more columns.
        valid_from: first moment of a version, inclusive.
        valid_to: end of a version, exclusive; null = current.
    """
    following, added = _following(key, valid_from, valid_to)
    start, end = _column(valid_from), _column(valid_to)
    return _none_in(frame, (following > start) & (end.isNull() | (end > following)), added)


def versions_are_contiguous(
    frame: DataFrame,
    *,
    key: Names,
    valid_from: str = VALID_FROM,
    valid_to: str = VALID_TO,
    last_is_current: bool = False,
) -> bool:
    """Every version of a key ends no earlier than the key's next version begins.

    Args:
        key, valid_from, valid_to: as for ``versions_do_not_overlap``.
        last_is_current: whether a key's last version must be current, too: set it for a table that
            stores tombstones as versions.
    """
    following, added = _following(key, valid_from, valid_to)
    end = _column(valid_to)
    ended = following.isNull() & end.isNotNull() if last_is_current else F.lit(False)
    return _none_in(frame, (end < following) | ended, added)


def one_version_per_key_and_timestamp(
    frame: DataFrame, *, key: Names, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """No key has two versions with the same ``valid_from``.

    Args:
        key, valid_from, valid_to: as for ``versions_do_not_overlap``.
    """
    following, added = _following(key, valid_from, valid_to)
    return _none_in(frame, following == _column(valid_from), added)


def valid_from_before_valid_to(
    frame: DataFrame, *, valid_from: str = VALID_FROM, valid_to: str = VALID_TO
) -> bool:
    """Every version has a ``valid_from`` and ends after it; a version of zero length is refused.

    Args:
        valid_from, valid_to: as for ``versions_do_not_overlap``.
    """
    start, end = _column(valid_from), _column(valid_to)
    return _none_in(frame, start.isNull() | (end <= start))


def one_current_version_per_key(frame: DataFrame, *, key: Names, valid_to: str = VALID_TO) -> bool:
    """No key has two versions without an end; a key may have no current version.

    Args:
        key, valid_to: as for ``versions_do_not_overlap``.
    """
    is_current = _column(valid_to).isNull()
    name = _helper("current_versions", _names(key), valid_to)
    current = F.count(F.when(is_current, 1)).over(_of_key(key))
    return _none_in(frame, is_current & (_column(name) > 1), {name: current})


def nothing_older_than_retention(
    frame: DataFrame,
    *,
    retention: timedelta,
    valid_from: str = VALID_FROM,
    valid_to: str = VALID_TO,
    stream_time: datetime | None = None,
) -> bool:
    """No version ended before the history retention began: ``valid_to > stream time - retention``.

    A version that ended exactly at that bound has expired. Source: KIP-889, "history retention".

    Args:
        retention: length of the history.
        valid_from, valid_to: as for ``versions_do_not_overlap``; both TIMESTAMP.
        stream_time: end of the history; None = the largest ``valid_from``, per partition if the frame
            has a column ``partition``, which takes a Spark job of its own.
    """
    if stream_time is not None:
        horizon = F.lit(stream_time - retention).cast("timestamp")
        return _none_in(frame, expired(horizon, valid_to))
    newest = F.max(F.unix_micros(_column(valid_from).cast("timestamp"))).alias("newest")
    if PARTITION not in frame.columns:
        horizon = F.timestamp_micros(F.lit(frame.agg(newest).collect()[0]["newest"])) - F.lit(retention)
        return _none_in(frame, expired(horizon, valid_to))
    found = {row[PARTITION]: row["newest"] for row in frame.groupBy(PARTITION).agg(newest).collect()}
    return _none_in(frame, expired(by_partition(found) - F.lit(retention), valid_to))


def one_row_per_key(frame: DataFrame, *, key: Names) -> bool:
    """No key has two rows.

    Args:
        key: one or more columns.
    """
    name = _helper("rows", _names(key))
    rows = F.count(F.lit(1)).over(_of_key(key))
    return _none_in(frame, _column(name) > 1, {name: rows})


def timestamps_do_not_decrease(
    frame: DataFrame,
    *,
    key: Names,
    timestamp: str = TIMESTAMP,
    order: Names | None = None,
    late: str = IS_LATE,
) -> bool:
    """No row is older than an earlier row of its key, in write order.

    Tombstones are compared as well. Late rows are excluded on both sides.

    Args:
        key: one or more columns. A log is ordered within its partitions, so rows of two partitions are
            compared only if ``order`` is given.
        timestamp: event time of a row.
        order: the columns that give the write order; None = ``offset`` within ``partition``.
        late: a BOOLEAN column that is true for late rows; without such a column no row is late.
    """
    keys = _names(key)
    if order is None:
        keys, order = ([PARTITION, *keys] if PARTITION in frame.columns else keys), [OFFSET]
    among = ~F.coalesce(_column(late), F.lit(False)) if late in frame.columns else None
    rule = decreasing(keys, timestamp, _names(order), among)
    return _none_in(frame, rule.violated, rule.columns)


def one_result_per_window(frame: DataFrame, *, key: Names, order: Names | None = None) -> bool:
    """No window of a key has two results: results are final.

    Args:
        key: the key columns. The window columns ``window_start`` and ``window_end`` belong to the key,
            and are added if the frame has them.
        order: the columns that give the write order, which separates the first result from later ones;
            None = ``partition, offset`` if the frame has them.
    """
    keys = _names(key)
    keys += [c for c in (WINDOW_START, WINDOW_END) if c in frame.columns and c not in keys]
    if order is None:
        order = [c for c in (PARTITION, OFFSET) if c in frame.columns] or keys
    rule = repeated_results(keys, _names(order))
    return _none_in(frame, rule.violated, rule.columns)


_PROMISED: dict[Callable[..., bool], str] = {
    versions_do_not_overlap: "no version ends after the next one begins",
    versions_are_contiguous: "every version ends where the next one begins",
    one_version_per_key_and_timestamp: "no key has two versions that begin at the same time",
    valid_from_before_valid_to: "every version begins before it ends",
    one_current_version_per_key: "no key has two current versions",
    nothing_older_than_retention: "no version ended before the history retention began",
    one_row_per_key: "no key has two current rows",
    timestamps_do_not_decrease: "per key, no result is older than an earlier one, unless it was late",
    one_result_per_window: "no window has two results: results are final",
}
CHECKS = {check.__name__: check for check in _PROMISED}
"""The checks by their names in pandera."""
PROMISES = {check.__name__: promise for check, promise in _PROMISED.items()}
"""The promise of each invariant, in a sentence."""


# ------------------------------------------------------------------------------ invariants of a node


def invariants_of_view(node: Stream) -> dict[str, dict[str, Any]]:
    """Returns the invariants of a table's view by name, with check parameters; a stream has none."""
    key = {"key": [*node.key]}
    if isinstance(node, VersionedTable):
        return {
            "versions_do_not_overlap": key,
            "versions_are_contiguous": {**key, "last_is_current": True},
            "one_version_per_key_and_timestamp": key,
            "valid_from_before_valid_to": {},
            "one_current_version_per_key": key,
            "nothing_older_than_retention": {"retention": node.history_retention},
        }
    return {"one_row_per_key": key} if isinstance(node, Table) else {}


def invariants_of_log(node: Stream) -> dict[str, dict[str, Any]]:
    """Returns the invariants of a log by name: the order of results that the operator promises."""
    plan, key = processor_of(node).plan(), {"key": [*node.key]}
    found: dict[str, dict[str, Any]] = {}
    if plan.monotonic:
        found["timestamps_do_not_decrease"] = key
    if plan.emits_once:
        found["one_result_per_window"] = key
    return found


# pandera checks


@dataclass(frozen=True)
class Probe:
    """A check that has no condition: a function of the DataFrame that must return true. It gets the
    rows that are no tombstones, and is not called if there are none.

    Args:
        warns: see ``Rule``.
    """

    name: str
    holds: Callable[[DataFrame], bool]
    warns: bool = False


class _Recorder:
    """Replaces a DataFrame and records the filters that a check applies.

    Args:
        rows: how many rows a filter finds.
        columns: of the DataFrame.
        whole: of a filtered one, what it is a filter of.
    """

    def __init__(self, rows: int, columns: Sequence[str], whole: _Recorder | None = None) -> None:
        self.rows, self.columns, self.whole = rows, list(columns), whole
        self.conditions: list[Any] = []
        self.added = dict[str, Column]()

    def withColumns(self, added: Mapping[str, Column]) -> _Recorder:
        (self.whole or self).added.update(added)
        return self

    def withColumn(self, name: str, column: Column) -> _Recorder:
        return self.withColumns({name: column})

    def filter(self, condition: Any) -> _Recorder:
        whole = self.whole or self
        whole.conditions.append(condition)
        return _Recorder(self.rows, self.columns, whole)

    where = filter

    def limit(self, _: int) -> _Recorder:
        return self._filtered()

    def count(self) -> int:
        return self._filtered().rows

    def _filtered(self) -> _Recorder:
        if self.whole is None:
            raise TypeError("a check of the number of rows, or of some rows, is no check of each row")
        return self

    def isEmpty(self) -> bool:
        return self.count() == 0


def rule_of(name: str, check: Callable[[Any], Any], columns: Sequence[str]) -> Rule | None:
    """Returns a check as a rule, if it passes exactly when its filter returns no row; else None.

    Args:
        columns: the columns of the DataFrame to check.
    """
    empty, full = _Recorder(0, columns), _Recorder(1, columns)
    try:
        shaped = bool(check(empty)) and not bool(check(full))
    except Exception:
        return None
    # A check may apply a second filter if the first one finds rows: then one filter does not decide.
    if not shaped or len(empty.conditions) != 1 or len(full.conditions) != 1:
        return None
    condition = empty.conditions[0]
    violated = F.expr(condition) if isinstance(condition, str) else condition
    return Rule(name, violated, empty.added)


def with_columns_of(frame: DataFrame, rules: Sequence[Rule]) -> DataFrame:
    """Returns the DataFrame with the columns that the rules' conditions need."""
    added = {name: column for rule in rules for name, column in rule.columns.items()}
    return with_columns(frame, added)


def contract_of(node: Stream) -> tuple[list[Rule], list[Probe]]:
    """Returns the checks of the node's pandera model, for records that are about to be committed.

    Not-null columns and checks apply to records with a value: a tombstone needs only its key. Needs a
    running Spark session.
    """
    schema = pandera_schema(node.contract)
    if schema is None:
        return [], []
    rules: list[Rule] = []
    probes: list[Probe] = []

    def add(name: str, check: Callable[[Any], Any], warns: bool, of: str = "") -> None:
        found = rule_of(name, check, _columns_of_model(node))
        if found is None or found.columns:
            # A window must not mix rows with rejected ones or tombstones: they are filtered out first.
            probes.append(Probe(name, partial(_passes, node, name, check), warns))
        else:
            violated = found.violated & ~F.col(IS_TOMBSTONE)
            rules.append(Rule(name, violated, of=of, warns=warns))

    taken = set[str]()
    for column, declared in schema.columns.items():
        if not declared.nullable:
            present = F.col(column).isNull()
            value = column in node.value_columns
            absent = present & ~F.col(IS_TOMBSTONE) if value else present
            taken.add(name := f"{column}_not_null")
            rules.append(Rule(name, absent, of=column))
        for check in declared.checks:
            name = check_name(check, column, taken)
            add(name, on_column(check, column, schema), check.raise_warning, column)
    for check in schema.checks:
        add(check_name(check, "", taken), on_frame(check), check.raise_warning)
    return rules, probes


def quarantine_broken(node: Stream, records: DataFrame) -> DataFrame:
    """Quarantines the source records that break a row-wise check of the node's pandera model, if the
    node is declared so; the reason names each broken check and its column.

    Rows of an initial snapshot are left to the gate: their share in the snapshot is not known here.

    Plan: a projection.

    Args:
        records: prepared, and completed from the table.
    """
    if node.on_contract_break != "quarantine":
        return records
    rules = [rule for rule in contract_of(node)[0] if not rule.warns]
    if not rules:
        return records
    broken = F.concat_ws(", ", *[F.when(rule.violated, F.lit(_with_column(rule))) for rule in rules])
    judged = F.col(OUTCOME).isNull() & (broken != "")
    if START in records.columns:
        judged = judged & ~F.col(START)
    reason = F.concat(F.lit(f"{Reason.BROKEN_CONTRACT}: "), broken)
    return records.withColumns(
        {
            REASON: F.when(judged, reason).otherwise(F.col(REASON)),
            OUTCOME: F.when(judged, Outcome.QUARANTINED).otherwise(F.col(OUTCOME)),
        }
    )


def _with_column(rule: Rule) -> str:
    """Returns the name of a rule and its column; a name that the user did not give begins with it."""
    has_it = not rule.of or rule.name.startswith(f"{rule.of} ")
    return rule.name if has_it else f"{rule.name} ({rule.of})"


def check_name(check: Any, column: str, taken: set[str]) -> str:
    """Returns the name that the user gave a check; without one, its column and its error text.

    Args:
        column: empty for a check of the DataFrame.
        taken: names that other checks have; the returned one is added.
    """
    text = str(check.error or check.name)
    given = check.name and (not column or str(check.error).split("(")[0] != check.name)
    name = check.name if given and check.name not in taken else f"{column} {text}".strip()
    several = sum(one == name or one.startswith(f"{name} (") for one in taken)
    name = f"{name} ({several + 1})" if name in taken else name
    taken.add(name)
    return name


def of_model(node: Stream, rows: DataFrame) -> DataFrame:
    """Returns rows with the columns of the node's schema and ``timestamp`` alone, for checks that use
    all columns: no two rows are equal with those that the library adds."""
    own = _columns_of_model(node)
    return rows.select(*[F.col(f"`{c}`") for c in rows.columns if c in own])


def _columns_of_model(node: Stream) -> list[str]:
    return [*dict.fromkeys((*node.schema.names, TIMESTAMP))]


def _passes(node: Stream, name: str, check: Callable[[Any], Any], rows: DataFrame) -> bool:
    """Returns whether the rows with a value pass a check.

    Raises:
        ContractError: the check raises, or returns something else. A DataFrame counts as true, and
            would pass whatever its rows are.
    """
    broken: Exception | None = None
    try:
        passed = check(of_model(node, rows.where(~F.col(IS_TOMBSTONE))))
        # Those of numpy too.
        if str(passed) in ("True", "False"):
            return bool(passed)
        got = repr(passed)
    except Exception as error:
        broken, got = error, f"{type(error).__name__}: {error}"
    raise ContractError(
        f"{node.name}: expected the check {name} of its schema to return True or False, got {got}; "
        "nothing was committed. Correct the check, then run again"
    ) from broken


def on_column(check: Any, column: str, schema: Any) -> Callable[[Any], Any]:
    """Returns a check of a column as a function of the whole DataFrame.

    Args:
        schema: of the model; some of pandera's checks look up the column's type in the DataFrame's.
    """
    # Importing pandera takes half a second: nodes without a contract must not wait for it.
    from pandera.api.pyspark.types import PysparkDataframeColumnObject

    def run(frame: Any) -> Any:
        if hasattr(frame, "pandera"):
            frame.pandera.add_schema(schema)
        on = PysparkDataframeColumnObject(frame, column)
        return _function_of(check, PysparkDataframeColumnObject)(on, **check._check_kwargs)

    return run


def on_frame(check: Any) -> Callable[[Any], Any]:
    """Returns the function that a check of a DataFrame calls."""
    return lambda frame: check._check_fn(frame, **check._check_kwargs)


def _function_of(check: Any, of: type) -> Callable[..., Any]:
    """Returns the function that a check calls.

    A schema copies the registry of pandera's own checks at construction, which may be before the
    PySpark checks were imported: they are then looked up anew.
    """
    function = check._check_fn
    known = getattr(function, "_function_registry", None)
    if known is None or of in known:
        return function
    import pandera.backends.pyspark.builtin_checks  # noqa: F401  # registers them
    from pandera.api.checks import Check

    registered: Any = Check.CHECK_FUNCTION_REGISTRY
    return registered[function._name]


def misfits(frame: DataFrame, wanted: StructType, more: tuple[str, ...] = ()) -> list[str]:
    """Returns missing columns and wrong types of a DataFrame. Runs no Spark job.

    Args:
        wanted: columns with their types; VOID = any type.
        more: further columns, of any type.
    """
    there = {f.name: f.dataType for f in frame.schema.fields}
    problems = [f"lacks {name}" for name in dict.fromkeys((*wanted.names, *more)) if name not in there]
    for f in wanted.fields:
        found = there.get(f.name, f.dataType)
        if not isinstance(f.dataType, NullType) and not same(found, f.dataType):
            problems.append(f"{f.name} is {found.simpleString()}, expected {f.dataType.simpleString()}")
    return problems


def _some_records(number: int) -> str:
    return "some records" if number < 0 else counted(number, "record")


def refuse(node: Stream, broken: dict[str, int], rows: DataFrame, rules: list[Rule]) -> None:
    """Stops a run before its commit if records break their contract.

    Args:
        broken: number of offending records by rule; empty = the run goes on.

    Raises:
        ContractError: names the rules, how many records break each, and one of them.
    """
    if not broken:
        return
    lines, of_name = list[str](), {rule.name: rule for rule in rules}
    for name, count in sorted(broken.items()):
        example = ""
        if (rule := of_name.get(name)) is not None:
            # Spark Connect has no toJSON.
            text = as_json(node.schema.names)
            found = with_columns_of(rows, [rule]).where(rule.violated).select(text).first()
            example = f", for example {found[0]}" if found else ""
        lines.append(f"{name}: {_some_records(count)}{example}")
    instead = ""
    if _may_quarantine(node) and broken.keys() <= {rule.name for rule in contract_of(node)[0]}:
        instead = "; on_contract_break='quarantine' commits the other records"
    raise ContractError(
        f"{node.name}: expected records that satisfy their schema, got some that break it; nothing was "
        f"committed. {'; '.join(lines)}. Fix the input, or the rule in the schema, and run again"
        f"{instead}"
    )


def _may_quarantine(node: Stream) -> bool:
    """Returns whether a stream or table may send the rows that break its model to quarantine."""
    if node.on_contract_break != "fail":
        return False
    try:
        replace(node, on_contract_break="quarantine")
    except TopologyError:
        return False
    return True


def check_bad_share(node: Stream, source: Pinned, rows: DataFrame, counts: Mapping[str, int]) -> None:
    """Refuses a run with too large a share of bad records. Unreadable files that the source is
    configured to quarantine do not count.

    Raises:
        ContractError: the share exceeds the source's ``max_bad_share``; shows up to three records.
    """
    bad, total = counts[Outcome.QUARANTINED], counts["in"]
    if not total or bad / total <= source.max_bad_share:
        return
    records = rows.where(
        (F.col(OUTCOME) == Outcome.QUARANTINED) & (F.col(REASON) != Reason.UNREADABLE_FILE)
    )
    files = bad - records.count()
    bad, total = bad - files, total - files
    if not total or bad / total <= source.max_bad_share:
        return
    worst = records.select(SOURCE, POSITION, REASON, RAW).orderBy(ARRIVAL).limit(3).collect()
    examples = "; ".join(f"{r[0]} row {r[1]}: {r[2]}: {_text(r[3])[:80]}" for r in worst)
    texts = [_text(r[3]) for r in worst if r[2] == Reason.UNREADABLE]
    hint = hint_of(texts, node.schema, node.source)
    raise ContractError(
        f"{node.name}: {bad:,} of {counted(total, 'record is', 'records are')} bad "
        f"({bad / total:.1%}), expected at most {source.max_bad_share:.1%}; nothing was committed. "
        f"{examples}. {hint}Fix the input, or raise max_bad_share of the source to send them to "
        "quarantine"
    )


def _text(raw: Any) -> str:
    return bytes(raw).decode("utf-8", "backslashreplace") if isinstance(raw, bytearray) else str(raw)


def _warn(node: Stream, broken: dict[str, int]) -> None:
    """Warns of records that break checks with ``raise_warning``, as pandera does.

    Args:
        broken: see :func:`refuse`.
    """
    for name, count in broken.items():
        warnings.warn(
            f"{node.name}: the check {name}, which holds no record back (raise_warning=True), is "
            f"broken by {_some_records(count)}",
            stacklevel=2,
        )


# Gate


_REJECTED = (*REFUSED, Outcome.QUARANTINED, Outcome.TOO_LATE)
_ROWS_OF_A_BLOCK = 8
"""The average number of rows of a block from which on blocks pay off."""
_COUNTED = (Outcome.APPLIED, Outcome.DROPPED, Outcome.COVERED, Outcome.NOTHING_NEW, *_REJECTED)


@dataclass(frozen=True)
class GateResult:
    """Counts and times of rows that have passed the gate and may be committed.

    Args:
        counts: records by outcome, and the processor's tallies.
        by_partition: these counts per partition.
        times: per partition, the largest timestamp of an applied row or a duplicate.
        earliest: the smallest timestamp of an applied row that is not its key's latest.
        first_rows: how many applied rows of a plain table replace no row; None = not counted.
        blocks: at least as many as there are blocks of applied rows, see
            ``arrival_order.number_by_blocks``; None = not counted.
    """

    counts: dict[str, int]
    by_partition: dict[int, dict[str, int]]
    times: dict[int, int]
    earliest: int | None
    first_rows: int | None
    blocks: int | None = None

    @property
    def in_blocks(self) -> bool:
        """Whether rows are numbered by blocks: many rows in few blocks."""
        rows = self.counts[Outcome.APPLIED]
        few = self.blocks is not None and self.blocks <= min(MOST_BLOCKS, rows // _ROWS_OF_A_BLOCK)
        return few and not self.single_task

    @property
    def single_task(self) -> bool:
        """Whether a partition has so few applied records that one task can sort them."""
        return max((c[Outcome.APPLIED] for c in self.by_partition.values()), default=0) <= CHUNK


def gate(
    node: Stream, plan: RunPlan, rows: DataFrame, stream_time: Column, few: bool = False
) -> GateResult:
    """Checks contract and invariants of a run's results and counts them, in one aggregate.

    Args:
        stream_time: stream time of the row's partition before the run, TIMESTAMP; null = none yet.
        few: whether the rows are few; then counts that only speed up large runs are left out.

    Raises:
        ContractError: rows break their schema's checks, or an invariant.
    """
    rules, probes = contract_of(node)
    rules += invariants_before_commit(node, plan, rows.columns, stream_time)
    applied = F.col(OUTCOME) == Outcome.APPLIED
    # Duplicates advance stream time too: whether the next record is a duplicate depends on it.
    moving = (Outcome.APPLIED, Outcome.DUPLICATE)
    tallies, smallest = plan.counts.tallies(rows.columns), plan.counts.smallest
    wanted: dict[str, Column] = {
        "in": F.count(F.lit(1)),
        **tallies,
        "_time": F.max(F.unix_micros(TIMESTAMP)),
        **{f"_rule{i}": F.count_if(applied & rule.violated) for i, rule in enumerate(rules)},
    }
    if IS_LATEST in rows.columns:
        wanted["_earliest"] = F.min(F.when(applied & ~F.col(IS_LATEST), F.unix_micros(TIMESTAMP)))
    if probes:
        wanted["_valued"] = F.count_if(applied & ~F.col(IS_TOMBSTONE))
    first_rows = not few and node.is_table and not node.versioned and OLD in rows.columns
    if first_rows:
        wanted["_first_rows"] = F.count_if(applied & F.col(OLD).isNull())
    in_blocks = not few and plan.order == ResultOrder((ARRIVAL,))
    if in_blocks:
        block = F.when(applied, arrival_block())
        wanted |= {"_first_block": F.min(block), "_last_block": F.max(block)}
    checked = with_columns_of(rows, rules)
    # By outcome, too: fewer columns than with a count of each outcome, which take longer to plan.
    aggregates = [c.alias(name) for name, c in wanted.items()]
    found = checked.groupBy(PARTITION, OUTCOME).agg(*aggregates).collect()
    names = ("in", *_COUNTED, *tallies)
    of_partition: dict[int, list[Row]] = {}
    for row in found:
        of_partition.setdefault(row[PARTITION], []).append(row)

    def tally(name: str, some: Sequence[Row]) -> int:
        values = [row[name] for row in some if row[name] is not None]
        return min(values, default=0) if name in smallest else sum(values)

    by_partition = {
        partition: {
            "in": sum(row["in"] for row in some),
            **{outcome: sum(r["in"] for r in some if r[OUTCOME] == outcome) for outcome in _COUNTED},
            **{name: tally(name, some) for name in tallies},
        }
        for partition, some in of_partition.items()
    }
    counts = {name: sum(some[name] for some in by_partition.values()) for name in names}
    broken = {rule.name: sum(row[f"_rule{i}"] for row in found) for i, rule in enumerate(rules)}
    broken = {name: n for name, n in broken.items() if n}
    if probes and any(row["_valued"] for row in found):
        kept = rows.where(applied)
        broken.update({p.name: -1 for p in probes if not p.holds(kept)})
    strict = {one.name for one in (*rules, *probes) if not one.warns}
    _warn(node, {name: n for name, n in broken.items() if name not in strict})
    broken = {name: n for name, n in broken.items() if name in strict}
    refuse(node, broken, rows, [replace(r, violated=applied & r.violated) for r in rules])
    moved = {
        partition: [r["_time"] for r in some if r[OUTCOME] in moving and r["_time"] is not None]
        for partition, some in of_partition.items()
    }
    times = {partition: max(some) for partition, some in moved.items() if some}
    earliest = [row["_earliest"] for row in found if "_earliest" in wanted]
    return GateResult(
        counts,
        by_partition,
        times,
        min((t for t in earliest if t is not None), default=None),
        sum(row["_first_rows"] for row in found) if first_rows else None,
        _blocks(found) if in_blocks else None,
    )


def _blocks(found: Sequence[Row]) -> int | None:
    """Returns ``GateResult.blocks`` by the first and last block of each group of rows; None if the
    numbers of blocks are too large."""
    ends = [
        (row["_first_block"], row["_last_block"]) for row in found if row["_last_block"] is not None
    ]
    if any(last > LAST_BLOCK for _, last in ends):
        return None
    return sum(last - first + 1 for first, last in ends)


def invariants_before_commit(
    node: Stream, plan: RunPlan, columns: Sequence[str], stream_time: Column
) -> list[Rule]:
    """Returns the invariants of the rows that a run is about to commit, and of the changed intervals.

    - A row of a table that becomes the current one is compared with the row it replaces, its ``old``: a
      version begins where the version before ends, so it must not begin earlier. No other row is read.
    - No row applied to a versioned table is older than the table's retention before the run.
    - Results of a stream, which have no ``old``, are compared among the rows of the run.

    Only the asset checks compare with all rows of earlier runs. Needs a running Spark session.
    """
    promised = (isinstance(node, VersionedTable), plan.monotonic, plan.emits_once)
    if not any(promised):
        return []
    found = list[Rule]()
    replaces = None
    if isinstance(node, Table) and OLD in columns:
        before = F.col(OLD)[TIMESTAMP]
        latest = F.col(IS_LATEST) if IS_LATEST in columns else F.lit(True)
        replaces = latest & (F.col(TIMESTAMP) < before)
    if isinstance(node, VersionedTable):
        if replaces is not None:
            found.append(Rule("versions_do_not_overlap", replaces))
        old = is_refused(F.col(TIMESTAMP), node.version_rules, stream_time)
        if START in columns:  # rows of an initial snapshot are current, however old
            old = old & ~F.col(START)
        if not follows_source(node):  # such a table takes the source's rows, however old
            found.append(Rule("nothing_older_than_retention", old))
    # The outcome is part of the key: applied rows must not be compared with the others.
    key = [OUTCOME, PARTITION, *node.key]
    if plan.monotonic and replaces is not None:
        found.append(Rule("timestamps_do_not_decrease", replaces))
    elif plan.monotonic and not plan.order.by_time:  # in an order by time, no row can break it
        among = ~F.coalesce(F.col(IS_LATE), F.lit(False)) if IS_LATE in columns else None
        found.append(decreasing(key, TIMESTAMP, plan.order.columns(), among))
    if plan.emits_once:
        found.append(repeated_results(key, plan.order.columns()))
    return found
