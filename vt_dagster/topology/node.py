"""Base classes of streams, tables and operators, their names, and the checks common to all.

Operators depend on this module only, not on ``vt_dagster.topology.model``, whose public classes have a
method for each operator. The name of an asset is a directory of the warehouse and part of names in
Dagster.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from pyspark.sql.types import DataType, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, spoken
from vt_dagster.topology.expressions import check_expressions
from vt_dagster.topology.options import OPTIONS, check_options, check_types
from vt_dagster.topology.schema import as_struct, check_columns, check_timestamp, names_before
from vt_dagster.topology.specification import Names, OperatorSpec
from vt_dagster.topology.version_rules import VersionRules
from vt_dagster.topology.windows import Window

# Asset names


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_AN_ASSET = frozenset({"attempts", "log", "quarantine", "view"})
"""Folders of an asset's own tables: the path of another asset must not lead through one."""
_LONGEST = 100
"""Maximum length of a name. It is part of directory, file, op and check names, which are limited to
about 200 characters."""


def require_name(name: str, kind: str) -> None:
    """Raises TopologyError for a name that cannot be a directory and part of a Dagster name.

    Args:
        kind: what is named, with its article.
    """
    if not _NAME.fullmatch(name):
        raise TopologyError(
            f"{name!r} is not a name for {kind}: use letters, digits and underscores, not starting "
            "with a digit"
        )
    if len(name) > _LONGEST:
        raise TopologyError(
            f"{name[:20]!r}… is not a name for {kind}: it has {len(name)} characters, use at most "
            f"{_LONGEST}"
        )


def require_path(path: str, kind: str) -> list[str]:
    """Returns the parts of an asset's path in a warehouse, ``shop/eu/prices``: its Dagster key.

    Raises:
        TopologyError: an invalid path, for example one inside the folder of another asset.
    """
    parts = path.split("/")
    for part in parts:
        require_name(part, kind)
        if len(parts) > 1 and part in _OF_AN_ASSET:
            raise TopologyError(
                f"{path!r} is not a name for {kind}: {part!r} is a folder of an asset's own tables; "
                "give it another key prefix or name"
            )
    return parts


# Node


Emit = Literal["every_update", "per_run"]
"""``per_run``: only the last update of each key in a run."""

Freshness: TypeAlias = Literal["every_run", "on_growth"] | timedelta
"""How far a table's view may lag behind its log, see ``Table``."""

Kind = Literal["stream", "table", "versioned_table"]

N = TypeVar("N", bound="Node")
Input: TypeAlias = Any
"""A ``Node``. Users see ``Stream`` or ``Table``, which this module cannot import (import cycle)."""

MIXED = "mixed"
"""Partitioning of merged streams that are not copartitioned: a key may be in several partitions."""
_DEEPEST = 3
"""Maximum number of parts of a key prefix: a search for assets goes this deep into a warehouse, which
may be any directory."""
_KINDS: dict[Kind, type[Node]] = {}
_CHECKED = {"renamed", *(option.name for option in OPTIONS if option.check is not None)}
"""Options with a check of their own, which names the values that it expects."""


def listed(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names or expressions as a tuple; a text is one of them.

    A value of another type is returned as it is: ``check_types`` refuses it, and names the asset.
    """
    if isinstance(names, str):
        return (names,)
    several = isinstance(names, Iterable) and not isinstance(names, Mapping | bytes)
    return tuple(names) if several else cast(Any, names)


class Source(Protocol):
    """Where the records of a source asset come from; see ``FilesSource`` and ``KafkaSource``.

    A source may also set ``tables_only = True``, ``own_partitions = True`` if its records come with
    partitions, and ``upstream``: the key of the asset that produces its records.
    """

    def describe(self) -> str:
        """Returns what is read, for descriptions and messages."""
        ...

    @property
    def gives_timestamp(self) -> bool:
        """Whether the source provides a ``timestamp`` for each record."""
        ...

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Raises TopologyError for columns that it cannot provide."""
        ...


class Operator(ABC):
    """An operator of a topology; makes a stream or table from its inputs."""

    name: str
    emit: Emit = "every_update"
    """Which results of a run are emitted: all, or the last of each key."""
    window: Window | None = None
    """Windows of the result's rows; None = not windowed."""

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Returns the names of this kind, for the names of ops: ``called``, else the class name as
        ``map_values``."""
        own = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        return vars(cls).get("called", (own,))

    @property
    def word(self) -> str:
        """The name of this operator's kind, one of ``words``."""
        return self.words()[0]

    def __post_init__(self) -> None:
        check_types(self, f"{self.name}")
        for node in self.inputs:
            if not isinstance(node, Node):
                raise TopologyError(f"{self.name}: expected a stream or a table as input, got {node!r}")

    @property
    @abstractmethod
    def inputs(self) -> tuple[Input, ...]:
        """The streams and tables whose logs it consumes or whose tables it reads."""

    @property
    def waits_for(self) -> tuple[Input, ...]:
        """The tables that must be ready before it reads any input, see ``VersionedTable``."""
        return ()

    @abstractmethod
    def result(self, **shown: Any) -> Any:
        """Makes the result; ``shown``: description, group, owners, key_prefix, freshness."""

    @abstractmethod
    def describe(self) -> str:
        """Returns what it does, in one sentence."""

    @abstractmethod
    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """Returns for each column of the result the (asset, column) pairs that it derives from."""

    @property
    def computed(self) -> set[str]:
        """The columns of the result that an expression computes; the others are copied from inputs."""
        return set()

    def copied(self) -> dict[str, list[tuple[str, str]]]:
        """Returns ``lineage`` for the columns that are unchanged columns of inputs."""
        computed = self.computed
        return {c: made_of for c, made_of in self.lineage().items() if c not in computed}

    def key_of_lookup(self, key: Sequence[str]) -> Sequence[str] | None:
        """Returns the columns of the result by which the operator joins it with a table; None = the
        result lacks them.

        Args:
            key: the result's key.
        """
        return key

    @property
    def rekeyed(self) -> bool:
        """Whether the result has another key than its source was partitioned by. Kafka Streams
        repartitions such records before it groups or joins them."""
        return False

    @property
    def copartitioned(self) -> bool:
        """Whether a key is in the same partition of all inputs."""
        return len({node.partitioning for node in self.inputs}) == 1

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        """Partitioning of the result: by default that of the first input; None = by its own key."""
        return self.inputs[0].partitioning

    @property
    @abstractmethod
    def specification(self) -> OperatorSpec:
        """The definition of the operator, as commits store it. Results of two definitions must not be
        in one log."""

    @property
    def settings(self) -> dict[str, str]:
        """Settings to show in the asset's metadata, by name."""
        return {}

    @property
    def log_columns(self) -> tuple[str, ...]:
        """Columns that it adds to its result's log, besides those of every log."""
        return ()

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        """How far back in stream time it may re-read the log of an input, by the input's name."""
        return {}

    @property
    def sums(self) -> dict[str, str]:
        """The result columns that are sums, each with the SQL expression that it adds up."""
        return {}

    @property
    def stored(self) -> bool:
        """Whether the result has a store of its own, which gives the latest and previous row of a key;
        otherwise its input gives both (filter, map_values)."""
        return True


@dataclass(frozen=True)
class Node:
    """Base of streams and tables; ``Stream`` documents the other fields.

    Args:
        operator: the operator that makes it; None: it has a source.
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
    unique_by: str | Sequence[str] | None = field(default=None, kw_only=True)
    within: timedelta | None = field(default=None, kw_only=True)
    on_contract_break: Literal["fail", "quarantine"] = field(default="fail", kw_only=True)
    operator: Operator | None = field(default=None, kw_only=True, repr=False)
    contract: Any = field(default=None, kw_only=True, repr=False)

    def __init_subclass__(cls, kind: Kind | None = None, **more: Any) -> None:
        """Registers the class that ``make_node`` uses for ``kind``."""
        super().__init_subclass__(**more)
        if kind is not None:
            _KINDS[kind] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", listed(self.key))
        object.__setattr__(self, "owners", listed(self.owners))
        if isinstance(self.key_prefix, str):
            object.__setattr__(self, "key_prefix", self.key_prefix.split("/"))
        check_types(self, f"{self.name}", skip=_CHECKED)  # whatever the type of the name
        require_name(self.name, f"a {self._kind()}")
        if not isinstance(self.schema, StructType) and self.contract is None:
            object.__setattr__(self, "contract", self.schema)
        object.__setattr__(self, "schema", as_struct(self.schema, self.name))
        object.__setattr__(self, "key_prefix", tuple(self.key_prefix))
        for part in self.key_prefix:
            require_name(part, "a key prefix")
        require_path("/".join(self.path), f"a {self._kind()}")
        if len(self.key_prefix) > _DEEPEST:
            raise TopologyError(
                f"{self.name}: expected a key_prefix of at most {_DEEPEST} parts, got "
                f"{'/'.join(self.key_prefix)!r}; join some parts with underscores"
            )
        inferred = self.operator is not None
        check_columns(self.name, self._kind(), self.key, self.schema, self.timestamp, inferred)
        if self.operator is None and not (self._timed_by_source and self.timestamp == TIMESTAMP):
            check_timestamp(self.name, self.schema, self.timestamp)
        if self.source is not None:
            self.source.check(self.name, self.key, self.schema)
            self._check_kind(self.source)
        names_before(self.name, self.renamed, self.schema)
        check_options(self)
        if self.operator is not None:
            self._check_logs(self.operator)
        check_expressions(self)

    def _check_kind(self, source: Source) -> None:
        if getattr(source, "tables_only", False) and not self.is_table:
            raise TopologyError(
                f"{self.name}: {source.describe()} are turned into upserts and deletions of rows: "
                "expected a Table or VersionedTable, got a Stream; declare a table, and use its "
                "to_stream()"
            )

    def _check_logs(self, operator: Operator) -> None:
        """Raises TopologyError if an input's log is truncated before the operator is done with it."""
        for node in operator.inputs:
            reach = operator.rescan_span.get(node.name, timedelta(0))
            if node.log_retention is not None and reach > node.log_retention:
                raise TopologyError(
                    f"{self.name}: re-reads records of {node.name!r} for {spoken(reach)} (grace "
                    f"period, window or corrected_for), longer than its log_retention of "
                    f"{spoken(node.log_retention)}; shorten the former or lengthen log_retention"
                )

    @property
    def _timed_by_source(self) -> bool:
        given = self.source is not None and self.source.gives_timestamp
        return given and TIMESTAMP not in self.schema.names

    def _kind(self) -> str:
        return type(self).__name__

    @property
    def path(self) -> tuple[str, ...]:
        """The parts of its Dagster key, which are also its folders in a warehouse."""
        return (*self.key_prefix, self.name)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The inputs of its operator; empty for a source."""
        return () if self.operator is None else self.operator.inputs

    @property
    def rekeyed(self) -> bool:
        """Whether an operator changed the key of its records, see ``Operator.rekeyed``."""
        return self.operator is not None and self.operator.rekeyed

    @cached_property
    def partitioning(self) -> tuple[Any, ...]:
        """The rule that gives a key its partition; nodes with equal rules are copartitioned."""
        own = ("source",) if getattr(self.source, "own_partitions", False) else None
        chosen = self.partition_by or ""
        # Key columns by position: the rules of two nodes are equal even if their keys differ in name.
        for place, name in enumerate(self.key):
            chosen = re.sub(rf"\b{re.escape(name)}\b", f"{{{place}}}", chosen)
        kept = own if self.operator is None else self.operator.partitioning
        return kept or ("key", self.partitions, chosen)

    @cached_property
    def earlier(self) -> Names:
        """Earlier names by column: those declared, and those inherited from an input's column of the
        same name."""
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

    def changed_definition(self, then: OperatorSpec | None) -> list[str]:
        """Returns the differences between the definition of its operator and that of an earlier commit,
        as text. A renamed column is no difference, nor is another source. A node of which only the
        columns are known has no differences.

        Args:
            then: None = the commit is of a source.
        """
        if self.operator is None:
            if then is None or self.source is None:
                return []
            return [f"it was the result of {then.operator}, has a source of its own now"]
        if then is None:
            now = self.operator.specification.operator
            return [f"it had a source of its own, is the result of {now} now"]
        sides = [up.earlier for up in self.inputs]
        return list(self.operator.specification.changes(then, sides, self.earlier))

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
        """Whether its records are a changelog with one current row per key."""
        return False

    @property
    def version_rules(self) -> VersionRules | None:
        """The rules of its versions; None = it is not versioned."""
        return None

    @property
    def retention(self) -> Duration | None:
        """Its history retention; None = it is not versioned."""
        return None

    @property
    def versioned(self) -> bool:
        """Whether it keeps the versions of each key over time."""
        return self.retention is not None

    @property
    def window(self) -> Window | None:
        """Windows of its rows; None = not windowed."""
        return None if self.operator is None else self.operator.window


def make_node(kind: Kind, name: str, **about: Any) -> Any:
    """Makes a stream or table of the class registered for ``kind``.

    Operators cannot import those classes, whose methods make operators.
    """
    return _KINDS[kind](name, **about)


def settings_of(kind: Kind) -> set[str]:
    """Returns the names of the settings of a stream or table of a kind."""
    return {one.name for one in fields(_KINDS[kind]) if one.init}


def topological(nodes: Sequence[N]) -> list[N]:
    """Returns the nodes and all their inputs in topological order, each once."""
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


def derived_from(node: N, nodes: Sequence[N]) -> list[N]:
    """Returns a node and all nodes derived from it, directly or indirectly, inputs first.

    Args:
        nodes: in topological order.
    """
    found = {node.name: node}
    for one in nodes:
        if any(up.name in found for up in one.inputs):
            found[one.name] = one
    return list(found.values())
