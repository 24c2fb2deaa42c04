"""Feature join: joins one stream with many versioned tables, each as of the row's own time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import has_key, union, with_columns
from vt_dagster.core.as_of_join import (
    ANSWER,
    KNOWN_AT,
    PLACES,
    SystemTimeHistory,
    answers_from_log,
    at_place,
)
from vt_dagster.core.stream_table_join import INSTANT, known_at_of
from vt_dagster.topology.feature_views import FeatureView

_AT, _SIDE, _HORIZON = "_at", "_side", "_horizon"


@dataclass(frozen=True)
class Feature:
    """A table to join, as the run reads it.

    Args:
        rows: its versions, with ``recorded_at``.
        stream_time: that of the row's partition.
        history: its history by system time.
    """

    view: FeatureView
    rows: DataFrame
    stream_time: Column
    history: SystemTimeHistory

    @property
    def strictly(self) -> Column:
        """The delay after ``valid_from`` at which a version matches: 1 µs for ``at="before"``."""
        return F.lit(INSTANT if self.view.at == "before" else timedelta(0))


def with_features(
    spine: DataFrame, features: Sequence[Feature], persist_rows: table_store.PersistRows
) -> DataFrame:
    """Joins the rows of a spine, once each, with the columns of each feature.

    The lookup takes the version valid at the row's time among those recorded up to the row's cut (a
    system time), see ``as_of_join``. A null key, a tombstone and a version older than ``max_age``
    give nulls.

    Plan: for all features of one key of the spine, one shuffle and sort of the spine and their
    versions. Rows whose version was recorded after their cut are answered from each table's log, by
    keys, times and positions, and are shuffled once more.

    Args:
        spine: log rows with ``partition``, ``_arrival`` and ``recorded_at``.
        persist_rows: persists the rows with their versions, which are read several times.
    """
    found = spine
    for key in dict.fromkeys(f.view.of_spine for f in features):
        places = [i for i, f in enumerate(features) if f.view.of_spine == key]
        found = _as_of_all(found, {i: features[i] for i in places}, key)
    found = persist_rows(found)
    own = [F.col(f"`{c}`") for c in spine.columns]
    answers = {i: best for i, f in enumerate(features) if (best := _by_log(found, i, f)) is not None}
    values = {_value(i): F.when(F.col(_sure(i)), F.col(_version(i))) for i in range(len(features))}
    all_sure = F.lit(True)
    for i in answers:
        all_sure = all_sure & F.col(_sure(i))
    told = with_columns(found.where(all_sure), values)
    if answers:
        late = found.where(~all_sure)
        for i, best in answers.items():
            late = late.join(best, at_place(), "left").drop(*PLACES)
            values[_value(i)] = F.coalesce(values[_value(i)], F.col(_answer(i)))
        wanted = [*own, *values]
        told = told.select(*wanted).unionByName(with_columns(late, values).select(*wanted))
    columns = [c for i, f in enumerate(features) for c in _columns(i, f)]
    return told.select(*own, *columns)


def _as_of_all(rows: DataFrame, features: Mapping[int, Feature], key: Sequence[str]) -> DataFrame:
    """Adds the version of each feature (null = no value), and whether the versions alone decide it."""
    keys = [f"_key{i}" for i in range(len(key))]
    every = rows.withColumns(
        {
            **{n: F.col(f"`{k}`") for k, n in zip(key, keys, strict=True)},
            _AT: F.col(TIMESTAMP),
            _SIDE: F.lit(1),
        }
    )
    for i, f in features.items():
        kept = [VALID_FROM, VALID_TO, RECORDED_AT, IS_TOMBSTONE, *_values(f)]
        horizon = table_store.horizon_of(f.view.table, f.stream_time).alias(_HORIZON)
        versions = f.rows.select(
            *[F.col(f"`{k}`").alias(n) for k, n in zip(f.view.table.key, keys, strict=True)],
            (F.col(VALID_FROM) + f.strictly).alias(_AT),
            F.lit(0).alias(_SIDE),
            F.struct(*[F.col(f"`{c}`") for c in kept], horizon).alias(_version(i)),
        )
        every = union(every, versions)
    so_far = W.partitionBy(*keys).orderBy(_AT, _SIDE).rowsBetween(W.unboundedPreceding, W.currentRow)
    last = {_version(i): F.last(_version(i), ignorenulls=True).over(so_far) for i in features}
    found = with_columns(every, last).where(F.col(_SIDE) == 1).drop(*keys, _AT, _SIDE)
    judged = dict[str, Column]()
    for i, f in features.items():
        row, asked = F.col(_version(i)), F.col(TIMESTAMP) - f.strictly
        end, horizon = row[VALID_TO], row[_HORIZON]
        # The version may have ended before the next stored one begins.
        in_time = end.isNull() | ((asked < end) & (horizon.isNull() | (asked >= horizon)))
        known = row.isNotNull() & in_time
        if f.view.as_known != "now":
            cut = known_at_of(f.view.as_known)
            by_then = row[RECORDED_AT].isNull() | (row[RECORDED_AT] <= cut)
            keyed = has_key([f"`{k}`" for k in key])
            judged[_sure(i)] = F.coalesce(known & by_then, F.lit(False)) | ~keyed
        else:
            judged[_sure(i)] = F.lit(True)
        keyless = ~has_key([f"`{k}`" for k in key])
        judged[_version(i)] = F.when(known & ~row[IS_TOMBSTONE] & ~keyless, row)
    return with_columns(found, judged)


def _by_log(found: DataFrame, i: int, feature: Feature) -> DataFrame | None:
    view = feature.view
    if view.as_known == "now":
        return None
    keys = [f"_key{n}" for n in range(len(view.of_spine))]
    doubtful = found.where(~F.col(_sure(i))).select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(view.of_spine, keys, strict=True)],
        (F.col(TIMESTAMP) - feature.strictly).alias(TIMESTAMP),
        known_at_of(view.as_known).alias(KNOWN_AT),
        PARTITION,
        ARRIVAL,
    )
    needed = [IS_TOMBSTONE, PARTITION, *_values(feature)]
    best = answers_from_log(
        doubtful,
        feature.history,
        needed=needed,
        left_key=keys,
        right_key=view.table.key,
        ends=False,
    )
    if best is None:
        return None
    types = cast(StructType, found.schema[_version(i)].dataType)
    empty = F.lit(None)
    fields = [
        (F.col(ANSWER)[f.name] if f.name in (VALID_FROM, *needed) else empty)
        .cast(f.dataType)
        .alias(f.name)
        for f in types.fields
    ]
    row = F.when(F.col(ANSWER).isNotNull(), F.struct(*fields))
    return best.select(*PLACES, row.alias(_answer(i)))


def _columns(i: int, feature: Feature) -> list[Column]:
    row, age = F.col(_value(i)), feature.view.max_age
    if age is not None:
        row = F.when(F.col(TIMESTAMP) - F.lit(age) <= row[VALID_FROM], row)
    return [row[c].alias(name) for name, c in feature.view.named]


def _values(feature: Feature) -> list[str]:
    return [c for c in feature.view.chosen if c != VALID_FROM]


def _version(i: int) -> str:
    return f"_version{i}"


def _sure(i: int) -> str:
    return f"_sure{i}"


def _answer(i: int) -> str:
    return f"_answer{i}"


def _value(i: int) -> str:
    return f"_value{i}"
