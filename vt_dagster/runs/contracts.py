"""What must hold of records before they are committed: a pandera model, read as one pass.

pandera's own ``validate`` runs a Spark job for each check. Its checks have one shape, though: *no row
is left by this filter*. Here each check is asked for its filter, and all filters are counted together
in a single aggregate. A check of any other shape is run as pandera runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE
from vt_dagster.errors import ContractError
from vt_dagster.topology.model import Stream


@dataclass(frozen=True)
class Rule:
    """One invariant of the records: a name and the condition that an offending row meets."""

    name: str
    violated: Column


@dataclass(frozen=True)
class Probe:
    """A check that cannot be told as a condition: a function of the DataFrame that must be true."""

    name: str
    holds: Callable[[DataFrame], bool]


class _Recorder:
    """Stands in for a DataFrame and remembers the filter that a check asks it for."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.conditions: list[Any] = []

    def filter(self, condition: Any) -> _Recorder:
        self.conditions.append(condition)
        return self

    where = filter

    def limit(self, _: int) -> _Recorder:
        return self

    def count(self) -> int:
        return self.rows

    def isEmpty(self) -> bool:
        return self.rows == 0


def _condition(check: Callable[[Any], Any]) -> Column | None:
    """The filter of a check that passes exactly where the filter leaves nothing; else None."""
    empty, full = _Recorder(0), _Recorder(1)
    try:
        shaped = bool(check(empty)) and not bool(check(full))
    except Exception:
        return None
    if not shaped or len(empty.conditions) != 1:
        return None
    condition = empty.conditions[0]
    return F.expr(condition) if isinstance(condition, str) else condition


def contract_of(node: Stream) -> tuple[list[Rule], list[Probe]]:
    """The invariants of a node's records, from its pandera model; none without one.

    Null columns and checks concern records with a value: a tombstone needs only its key. Needs a
    running Spark session.
    """
    if not hasattr(node.contract, "to_schema"):
        return [], []
    schema = node.contract.to_schema()
    rules: list[Rule] = []
    probes: list[Probe] = []

    def add(name: str, check: Callable[[Any], Any], tombstones: bool = False) -> None:
        found = _condition(check)
        if found is None:
            probes.append(Probe(name, check))
        else:
            rules.append(Rule(name, found if tombstones else found & ~F.col(IS_TOMBSTONE)))

    taken = set[str]()
    for column, declared in schema.columns.items():
        if not declared.nullable:
            present = F.col(column).isNull()
            value = column in node.value_columns
            rules.append(
                Rule(f"{column}_not_null", present & ~F.col(IS_TOMBSTONE) if value else present)
            )
        for check in declared.checks:
            add(_name(check, column, taken), _on_column(check, column))
    for check in schema.checks:
        add(check.name or str(check.error), _on_frame(check))
    return rules, probes


def _name(check: Any, column: str, taken: set[str]) -> str:
    """The name that the user gave a check; its column and what it says where there is none."""
    said = str(check.error)
    given = check.name and said.split("(")[0] != check.name
    name = check.name if given and check.name not in taken else f"{column} {said}"
    taken.add(name)
    return name


def _on_column(check: Any, column: str) -> Callable[[Any], Any]:
    # Whoever has no contract does not wait for pandera: importing it takes half a second.
    from pandera.api.pyspark.types import PysparkDataframeColumnObject

    def run(frame: Any) -> Any:
        on = PysparkDataframeColumnObject(frame, column)
        return _function_of(check, PysparkDataframeColumnObject)(on, **check._check_kwargs)

    return run


def _function_of(check: Any, of: type) -> Callable[..., Any]:
    """What a check calls. A schema copies what is known of pandera's own checks when it is made, which
    may have been before anything had imported those for PySpark."""
    function = check._check_fn
    known = getattr(function, "_function_registry", None)
    if known is None or of in known:
        return function
    import pandera.backends.pyspark.builtin_checks  # noqa: F401  # registers them
    from pandera.api.checks import Check

    registered: Any = Check.CHECK_FUNCTION_REGISTRY
    return registered[function._name]


def _on_frame(check: Any) -> Callable[[Any], Any]:
    return lambda frame: check._check_fn(frame, **check._check_kwargs)


def refuse(node: Stream, broken: dict[str, int], rows: DataFrame, rules: list[Rule]) -> None:
    """Stops a run before its commit where records break their contract.

    Args:
        broken: number of offending records by rule; nothing happens where it is empty.

    Raises:
        ContractError: names the rules, how many records break each, and one of them.
    """
    if not broken:
        return
    lines: list[str] = []
    for name, count in sorted(broken.items()):
        example = ""
        for rule in rules:
            if rule.name == name:
                found = rows.where(rule.violated).select(*node.schema.names).limit(1).toJSON()
                example = f", for example {found.first()}"
        lines.append(f"{name}: {count if count >= 0 else 'some'} record(s){example}")
    raise ContractError(
        f"{node.name}: expected records that satisfy their schema, got some that break it; nothing "
        f"was committed. {'; '.join(lines)}. Mend the input, or the rule in the schema, and run again"
    )
