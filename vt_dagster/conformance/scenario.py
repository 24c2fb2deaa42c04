"""Scenario files, their outcomes, and the parts of their topologies.

Each scenario is one partition of a topology, and a part of its keys.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster.errors import SourceError
from vt_dagster.topology.durations import epoch_micros
from vt_dagster.topology.model import Stream

# Scenario


Granularity = Literal["record", "run"]
Entry = dict[str, Any]

OPERATORS = (
    "versioned_store",
    "stream_table_join",
    "table_table_join",
    "foreign_key_join",
    "table_filter",
    "table_map_values",
    "table_aggregate",
    "windowed_aggregate",
    "table_suppress",
    "global_table",
    "chain",
    "stream_merge",
    "stream_select_key",
    "stream_flat_map_values",
    "stream_stream_join",
)
"""The operators defined in FORMAT.md."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """One scenario. Where we differ from Kafka Streams on purpose, its expectations are those of
    ``by_design``."""

    name: str
    path: Path
    operator: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    expected: Sequence[Any]
    error: Mapping[str, Any] | None
    final_store: Sequence[Entry] | None
    dropped: int | None

    @property
    def optional(self) -> bool:
        """Whether it is reported separately and never fails: its directory is named ``optional``."""
        return "optional" in self.path.parts


@dataclass
class ScenarioOutcome:
    """The outcome of one scenario."""

    scenario: Scenario
    result: Literal["identical", "different", "not supported"]
    differences: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Job:
    """Runs a group of scenarios together and settles their outcomes.

    Args:
        cost: estimated number of node runs; long jobs start first.
    """

    cost: int
    run: Callable[[SparkSession], None]


@dataclass(frozen=True)
class Report:
    """The outcomes of all scenarios."""

    outcomes: Sequence[ScenarioOutcome]

    def _count(self, result: str, optional: bool = False) -> int:
        return sum(o.result == result and o.scenario.optional is optional for o in self.outcomes)

    @property
    def identical(self) -> int:
        """Number of scenarios, without optional ones, with exactly the expected output."""
        return self._count("identical")

    @property
    def different(self) -> int:
        """Number of scenarios, without optional ones, with other output."""
        return self._count("different")

    @property
    def not_supported(self) -> int:
        """Number of scenarios, without optional ones, that cannot run: see ``steps.supported``."""
        return self._count("not supported")

    @property
    def ok(self) -> bool:
        """Whether nothing differs and everything is supported."""
        return self.different == 0 and self.not_supported == 0

    def lines(self) -> Iterator[str]:
        """Yields each difference, the counts of optional scenarios if any, and last the counts."""
        for outcome in self.outcomes:
            if outcome.result == "different":
                yield f"{outcome.scenario.name} ({outcome.scenario.path}):"
                yield from outcome.differences
        if any(o.scenario.optional for o in self.outcomes):
            yield f"optional, not counted: {self._summary(True)}"
        yield self._summary(False)

    def _summary(self, optional: bool) -> str:
        counts = (self._count(r, optional) for r in ("identical", "different", "not supported"))
        return "{} identical, {} different, {} not supported".format(*counts)

    def as_json(self) -> Entry:
        """Returns the report as plain values: counts, and each scenario with its differences."""
        return {
            "identical": self.identical,
            "different": self.different,
            "not_supported": self.not_supported,
            "ok": self.ok,
            "scenarios": [
                {
                    "name": o.scenario.name,
                    "path": str(o.scenario.path),
                    "operator": o.scenario.operator,
                    "optional": o.scenario.optional,
                    "result": o.result,
                    "differences": o.differences,
                }
                for o in self.outcomes
            ],
        }


def read_scenarios(paths: Iterable[Path | str]) -> Iterator[Scenario]:
    for path in map(Path, paths):
        if not path.exists():
            raise SourceError(
                f"expected a scenario file or directory, got {path}, which does not exist; correct it"
            )
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
                for each in content if isinstance(content, list) else [content]:
                    yield _scenario(file, each)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SourceError(
                    f"expected scenarios as FORMAT.md describes them in {file}, got: {error!r}"
                ) from error


def _scenario(path: Path, raw: Mapping[str, Any]) -> Scenario:
    wanted = {**raw, **raw.get("by_design", {})}
    metrics = wanted.get("metrics") or {}
    return Scenario(
        name=raw["name"],
        path=path,
        operator=raw["operator"],
        config=raw["config"],
        records=raw["records"],
        expected=wanted["expected"],
        error=wanted.get("expected_error"),
        final_store=wanted.get("final_store"),
        dropped=metrics.get("dropped_records"),
    )


def compare(what: str, expected: Sequence[Any], got: Sequence[Any]) -> list[str]:
    """Returns one message per position at which two lists differ."""
    missing = object()

    def text(value: Any) -> str:
        return "nothing" if value is missing else json.dumps(value, ensure_ascii=False)

    return [
        f"  {what} {i}: expected {text(e)} / got {text(g)}"
        for i, (e, g) in enumerate(zip_longest(expected, got, fillvalue=missing))
        if e != g
    ]


def settle(outcome: ScenarioOutcome, differences: list[str]) -> None:
    outcome.result = "different" if differences else "identical"
    outcome.differences = differences


def compare_state(
    scenario: Scenario, store: Sequence[Entry], dropped: int | None, failed_at: int | None
) -> list[str]:
    """Returns the differences in the final state: error, store, and the metric if counted."""
    must_fail_at = scenario.error["trigger"] if scenario.error else None
    if failed_at != must_fail_at:

        def text(at: int | None) -> str:
            return "none" if at is None else f"one at record {at}"

        return [f"  error: expected {text(must_fail_at)} / got {text(failed_at)}"]
    found: list[str] = []
    if scenario.final_store is not None:
        found += compare("final store", scenario.final_store, store)
    if None not in (scenario.dropped, dropped) and dropped != scenario.dropped:
        found.append(f"  dropped records: expected {scenario.dropped} / got {dropped}")
    return found


# Scenario topology


_SCHEMA = StructType(
    [
        StructField("scenario", IntegerType()),
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def millis(moment: datetime | None) -> int | None:
    return None if moment is None else epoch_micros(moment) // 1000


def source(kind: type[Stream], name: str, **more: Any) -> Any:
    about = {"schema": _SCHEMA, "tombstone": "value is null"}
    # So that a join with a regrouped table keeps scenarios apart.
    return kind(name, key=("scenario", "key"), partition_by="scenario", **{**about, **more})


def with_index() -> StructType:
    """Returns the columns of a source, and ``index``, the number of the record."""
    return StructType([*_SCHEMA.fields, StructField("index", IntegerType())])


def record_of(number: int, record: Mapping[str, Any]) -> Entry:
    return {
        "scenario": number,
        "partition": number,
        "key": record["key"],
        "value": record.get("value"),
        "timestamp": record["timestamp"],
    }


def by_scenario(rows: Iterable[Entry]) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = defaultdict(list)
    for row in rows:
        found[row["scenario"]].append(row)
    return found


def text(value: Any) -> str | None:
    return None if value is None else str(value)


def final_store(rows: Iterable[Entry]) -> list[Entry]:
    """Returns a view's rows in the form of a scenario's final store: no tombstones, times in ms."""
    return [
        {
            "key": row["key"],
            "value": text(row["value"]),
            "valid_from": millis(row.get("valid_from", row["timestamp"])),
            "valid_to": millis(row.get("valid_to")),
        }
        for row in rows
        if not row["is_tombstone"]
    ]
