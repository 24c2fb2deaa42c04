"""A stream or table as a typed value, what it is made by, and the rules that hold for any of them.

Operators know no more than this module of what they take and give. ``vt_dagster.topology.model`` adds
the classes that people use, with a method for each operator.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from pyspark.sql.types import DataType, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.asset_names import Called, require_name, require_path
from vt_dagster.topology.column_renames import Names, names_before, same_meaning
from vt_dagster.topology.deterministic_sql import check_expressions
from vt_dagster.topology.durations import Duration, check_duration, spoken
from vt_dagster.topology.schema import as_struct, check_columns, check_timestamp
from vt_dagster.topology.windows import Window

Emit = Literal["every_update", "per_run"]
"""``per_run``: only the last update of each key in a run."""

Freshness: TypeAlias = Literal["every_run", "on_growth"] | timedelta
"""How far a table's view may be behind its log, see ``Table``."""

Kind = Literal["stream", "table", "versioned_table"]

N = TypeVar("N", bound="Node")
Input: TypeAlias = Any
"""A ``Node``; to users of an operator it is a ``Stream`` or ``Table``, which cannot be named here."""

MIXED = "mixed"
"""The partitioning of streams of which one has a key in other partitions than another."""
_NO_MEANING = {
    *("name", "materialized", "emit", "monotone_timestamps"),
    *("grace", "grace_period", "corrected_for", "retention", "until"),
}
"""Fields that may change from run to run: what is said from then on is as true as what was before."""
_DEEPEST = 3
"""A warehouse is looked through for assets so deep and no further: it may be anybody's directory."""
_KINDS: dict[Kind, type[Node]] = {}


class Source(Protocol):
    """Where the records of a source asset come from; see ``FilesSource`` and ``KafkaSource``.

    A source may also say ``tables_only = True``, ``own_partitions = True`` where it has partitions of
    its own, and ``upstream``: the key of the asset that delivers what it reads.
    """

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        ...

    @property
    def gives_timestamp(self) -> bool:
        """Whether it has a ``timestamp`` of its own for each record."""
        ...

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Refuses columns that it cannot give, by a ``TopologyError``."""
        ...


class Operator(Called, ABC):
    """What a stream or table is the result of."""

    name: str
    emit: Emit = "every_update"
    """Which of a run's results count: every one, or the last of each key."""
    window: Window | None = None
    """The windows that the result's rows belong to; None where they belong to none."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[Input, ...]:
        """The streams and tables whose logs it consumes or whose views it reads."""

    @property
    def waits_for(self) -> tuple[Input, ...]:
        """The tables that it takes nothing without before they are ready, see ``VersionedTable``."""
        return ()

    @abstractmethod
    def result(self, **shown: Any) -> Any:
        """The stream or table that it makes; ``shown``: description, group, owners, key_prefix,
        freshness."""

    @abstractmethod
    def describe(self) -> str:
        """What it does, in a sentence."""

    @abstractmethod
    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """For each column of the result the (asset, column) pairs that it is made of."""

    @property
    def rekeyed(self) -> bool:
        """Whether the result's records have another key than that by which its source was partitioned.
        Kafka Streams then brings them to other partitions before it groups or joins them."""
        return False

    @property
    def copartitioned(self) -> bool:
        """Whether a key is in the same partition of all inputs."""
        return len({node.partitioning for node in self.inputs}) == 1

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        """That of a result, by default its first input's; None: its own key gives it."""
        return self.inputs[0].partitioning

    @property
    def meaning(self) -> dict[str, str]:
        """What its results mean, by name: with another value they would be results of something else,
        and do not belong in the same log. Not how long something is waited for or kept."""
        told = {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}
        told = {name: _meaning(value) for name, value in told.items() if name not in _NO_MEANING}
        return {"operator": type(self).__name__, **told}

    @property
    def settings(self) -> dict[str, str]:
        """What an asset's metadata says of it, by name."""
        return {}

    @property
    def log_columns(self) -> tuple[str, ...]:
        """Columns that it adds to its result's log, besides those of any log."""
        return ()

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        """Of each input whose log it reads again: so far back in stream time it may need that."""
        return {}

    @property
    def needs_whole_log(self) -> tuple[Input, ...]:
        """The inputs whose logs it may need as a whole at any time."""
        return ()

    @property
    def stored(self) -> bool:
        """Whether the result has a store of its own, which decides what is latest and what was
        before; else it passes on what its input says (filter, map_values)."""
        return True


def _meaning(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if is_dataclass(value):
        parts = {f.name: _meaning(getattr(value, f.name)) for f in fields(value)}
        told = ", ".join(f"{name}={part}" for name, part in parts.items() if name not in _NO_MEANING)
        return f"{type(value).__name__}({told})"
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_meaning, cast(Sequence[Any], value)))})"
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return ", ".join(f"{k}: {_meaning(v)}" for k, v in sorted(items))
    return getattr(value, "__qualname__", None) or str(value)


@dataclass(frozen=True)
class Node:
    """What streams and tables have in common; ``Stream`` says what the fields mean.

    Args:
        operator: what it is the result of; None: it has a source.
        contract: the pandera model that ``schema`` was made from, if any.
    """

    name: str
    key: Sequence[str] = field(kw_only=True)
    schema: Any = field(kw_only=True)
    timestamp: str = field(default=TIMESTAMP, kw_only=True)
    tombstone: str | None = field(default=None, kw_only=True)
    partitions: int = field(default=1, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)
    source: Source | None = field(default=None, kw_only=True)
    null_key: Literal["quarantine", "keep"] = field(default="quarantine", kw_only=True)
    description: str | None = field(default=None, kw_only=True)
    group: str | None = field(default=None, kw_only=True)
    owners: tuple[str, ...] = field(default=(), kw_only=True)
    key_prefix: Sequence[str] = field(default=(), kw_only=True)
    freshness: Freshness = field(default="on_growth", kw_only=True)
    renamed: Mapping[str, str] = field(default_factory=dict[str, str], kw_only=True)
    log_retention: timedelta | None = field(default=None, kw_only=True)
    operator: Operator | None = field(default=None, kw_only=True, repr=False)
    contract: Any = field(default=None, kw_only=True, repr=False)

    def __init_subclass__(cls, kind: Kind | None = None, **more: Any) -> None:
        """``kind``: of the class whose values ``make_node`` makes for operators."""
        super().__init_subclass__(**more)
        if kind is not None:
            _KINDS[kind] = cls

    def __post_init__(self) -> None:
        require_name(self.name, self._kind())
        if not isinstance(self.schema, StructType) and self.contract is None:
            object.__setattr__(self, "contract", self.schema)
        object.__setattr__(self, "schema", as_struct(self.schema, self.name))
        key = (self.key,) if isinstance(self.key, str) else tuple(self.key)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "owners", tuple(self.owners))
        prefix = self.key_prefix.split("/") if isinstance(self.key_prefix, str) else self.key_prefix
        object.__setattr__(self, "key_prefix", tuple(prefix))
        for part in self.key_prefix:
            require_name(part, "key prefix")
        require_path("/".join(self.path), self._kind())
        if len(self.key_prefix) > _DEEPEST:
            raise TopologyError(
                f"{self.name}: expected a key_prefix of at most {_DEEPEST} parts, got "
                f"{'/'.join(self.key_prefix)!r}; join some by underscores"
            )
        check_columns(self.name, self._kind(), key, self.schema, self.timestamp)
        if self.operator is None and not (self._timed_by_source and self.timestamp == TIMESTAMP):
            check_timestamp(self.name, self.schema, self.timestamp)
        if self.source is not None:
            self.source.check(self.name, key, self.schema)
            self._check_kind(self.source)
        names_before(self.name, self.renamed, self.schema)
        if self.partitions < 1:
            raise TopologyError(f"{self.name}: partitions must be 1 or more, got {self.partitions}")
        if self.null_key not in ("quarantine", "keep"):
            raise TopologyError(
                f"{self.name}: null_key must be 'quarantine' or 'keep', got {self.null_key!r}"
            )
        self._check_freshness()
        if self.log_retention is not None:
            check_duration(self.name, "log_retention", self.log_retention)
        if self.operator is not None:
            self._check_logs(self.operator)
        check_expressions(self)

    def _check_kind(self, source: Source) -> None:
        if getattr(source, "tables_only", False) and not self.is_table:
            raise TopologyError(
                f"{self.name}: {source.describe()} say what is true, and become puts and deletions of "
                "rows: expected a Table or VersionedTable, got a Stream; declare it as a table, whose "
                "changes to_stream() gives"
            )

    def _check_freshness(self) -> None:
        wanted = self.freshness
        length = isinstance(wanted, timedelta) and wanted >= timedelta(0)
        if not (wanted in ("every_run", "on_growth") or length):
            raise TopologyError(
                f"{self.name}: freshness must be 'on_growth', 'every_run' or a timedelta of 0 or more, "
                f"got {wanted!r}"
            )
        if wanted != "on_growth" and not self.is_table:
            raise TopologyError(
                f"{self.name}: freshness is of a table's view, but a stream has its log alone, which "
                "each run appends to: leave it out"
            )

    def _check_logs(self, operator: Operator) -> None:
        """Refuses to be made of a log that is cut off before its records are done with."""
        for node in operator.needs_whole_log:
            if node.log_retention is not None:
                raise TopologyError(
                    f"{self.name}: asks what was known of {node.name!r} at each record's time, which "
                    f"its whole log answers, but {node.name!r} has a log_retention of "
                    f"{spoken(node.log_retention)}; leave that out, or join with as_known='now'"
                )
        for node in operator.inputs:
            reach = operator.rescan_span.get(node.name, timedelta(0))
            if node.log_retention is not None and reach > node.log_retention:
                raise TopologyError(
                    f"{self.name}: needs records of {node.name!r} again for {spoken(reach)} (grace "
                    f"period, window or corrected_for), longer than {node.name!r} keeps its log, "
                    f"{spoken(node.log_retention)}; shorten that or lengthen its log_retention"
                )

    @property
    def _timed_by_source(self) -> bool:
        given = self.source is not None and self.source.gives_timestamp
        return given and TIMESTAMP not in self.schema.names

    def _kind(self) -> str:
        return type(self).__name__

    @property
    def path(self) -> tuple[str, ...]:
        """Its key in Dagster, and the folders of its tables in a warehouse."""
        return (*self.key_prefix, self.name)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The streams and tables that this one is made of; empty for a source."""
        return () if self.operator is None else self.operator.inputs

    @property
    def rekeyed(self) -> bool:
        """Whether its records have been brought to another key, see ``Operator.rekeyed``."""
        return self.operator is not None and self.operator.rekeyed

    @cached_property
    def partitioning(self) -> tuple[Any, ...]:
        """What gives a key its partition: two nodes of the same have a key in the same one."""
        own = ("source",) if getattr(self.source, "own_partitions", False) else None
        chosen = self.partition_by or ""
        for place, name in enumerate(self.key):  # whatever it is called
            chosen = re.sub(rf"\b{re.escape(name)}\b", f"{{{place}}}", chosen)
        kept = own if self.operator is None else self.operator.partitioning
        return kept or ("key", self.partitions, chosen)

    @cached_property
    def earlier(self) -> Names:
        """By column the names that it had before: as declared, and as it has them of an input's column
        of the same name."""
        found = dict(names_before(self.name, self.renamed, self.schema))
        known = {up.name: up.earlier for up in self.inputs}
        if self.operator is None or not any(known.values()):
            return found
        for column, made_of in self.operator.lineage().items():
            of_inputs = [known.get(a, {}).get(c, ()) for a, c in made_of if c == column]
            names = dict.fromkeys((*found.get(column, ()), *(n for some in of_inputs for n in some)))
            others = tuple(n for n in names if n not in self.schema.names)
            if others and column in self.schema.names:
                found[column] = others
        return found

    def changed_meaning(self, then: Mapping[str, str]) -> list[str]:
        """What its operator means now and did not mean by a commit, in words; columns that have been
        renamed since mean the same."""
        now = {} if self.operator is None else self.operator.meaning
        if not now or not then:
            return []
        sides = [up.earlier for up in self.inputs]
        return [
            f"{name} was {then.get(name)!r}, is {now.get(name)!r}"
            for name in {**now, **then}
            if not same_meaning(now.get(name, ""), then.get(name, ""), sides, self.earlier)
        ]

    @property
    def key_types(self) -> tuple[DataType, ...]:
        """Types of the key columns, in the order of ``key``."""
        return tuple(self.schema[k].dataType for k in self.key)

    @property
    def value_columns(self) -> tuple[str, ...]:
        """The columns that are not part of the key."""
        return tuple(f.name for f in self.schema.fields if f.name not in self.key)

    @property
    def is_table(self) -> bool:
        """Whether its records are changes of rows, of which one a key counts."""
        return False

    @property
    def retention(self) -> Duration | None:
        """How far back it remembers what was true when; None: it does not."""
        return None

    @property
    def versioned(self) -> bool:
        """Whether it remembers what was true when."""
        return self.retention is not None

    @property
    def window(self) -> Window | None:
        """The windows that its rows belong to; None where they belong to none."""
        return None if self.operator is None else self.operator.window


def make_node(kind: Kind, name: str, **about: Any) -> Any:
    """A stream or table of the class that was declared as of this kind.

    Operators make their results by it: the classes have methods that make operators.
    """
    return _KINDS[kind](name, **about)


def topological(nodes: Sequence[N]) -> list[N]:
    """The given nodes and all their inputs, each once, inputs first."""
    found: dict[str, Any] = {}

    def visit(node: Node) -> None:
        for source in node.inputs:
            visit(source)
        other = found.setdefault(node.name, node)
        if other != node:
            raise TopologyError(f"two different assets have the name {node.name!r}; rename one of them")

    for node in nodes:
        visit(node)
    return list(found.values())
