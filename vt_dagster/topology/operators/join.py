"""Base of the joins: two sides, and columns selected from both."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, Literal

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import Input, Node, Operator
from vt_dagster.topology.projection import Projection, Side
from vt_dagster.topology.schema import same_types

JoinKind = Literal["inner", "left", "outer"]


@dataclass(frozen=True)
class Join(Operator, ABC):
    """Two sides and the columns selected from them."""

    left: Input
    right: Input
    kind: JoinKind
    name: str
    select: tuple[str, ...] = ("left.*", "right.*")

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.left, self.right)

    @property
    def waits_for(self) -> tuple[Input, ...]:
        return tuple(side for side in self.inputs if side.is_table)

    def projection(self) -> Projection:
        """The columns of the result, checked against both sides."""
        sides = {"left": self._side(self.left), "right": self._side(self.right)}
        return Projection(self.name, tuple(self.left.key), sides, self.select)

    def _side(self, node: Node) -> Side:
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP,))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.projection().lineage()


def check_kind(name: str, what: str, kind: Any, kinds: tuple[str, ...]) -> None:
    """Raises TopologyError if a kind of join is not one of ``kinds``."""
    if kind not in kinds:
        raise TopologyError(f"{name}: a {what} is one of {', '.join(kinds)}, got {kind!r}")


def check_keys(name: str, left: Node, right: Node) -> None:
    """Raises TopologyError if the keys of both sides have different types."""

    def types(side: Node) -> str:
        together = zip(side.key, side.key_types, strict=True)
        return ", ".join(f"{k} {t.simpleString()}" for k, t in together)

    if not same_types(left.key_types, right.key_types):
        raise TopologyError(
            f"{name}: the keys of both sides must have the same types in the same order: "
            f"{left.name} has ({types(left)}), {right.name} has ({types(right)}); cast the key of "
            "one side in its schema"
        )
