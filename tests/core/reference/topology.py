"""Builds a topology of nodes from a scenario's config, and processes the scenario's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.core.reference.joins import ForeignKeyJoin, Stream, StreamTableJoin, TableJoin
from tests.core.reference.run import Change, Config, Record, Refused, Run
from tests.core.reference.stores import Store
from tests.core.reference.tables import Aggregate, Filter, MapValues, Source, Suppress, Table
from tests.core.reference.windows import windows_of


class Topology:
    """The nodes by step, the receivers of each input's records, and the store that is compared."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.nodes: dict[str, Any] = {}
        self.inputs: dict[str, list[Callable[[Record], None]]] = {}
        self.watched: tuple[str, Store] | None = None

    def build(self, operator: str, config: Config) -> None:
        if operator == "windowed_aggregate":
            self.inputs["stream"] = [windows_of(self.run, config).receive]
            return
        if operator == "global_table":
            if config["table"]["versioned"]:
                raise Refused("TopologyException", "a global table cannot be versioned")
            self.add({"id": "table", "op": "table", "input": "table", "table": config["table"]})
            return
        chain = operator == "chain"
        steps = config["steps"] if chain else list(steps_of(operator, config))
        for step in steps:
            self.add(step)
            if step.get("materialize"):
                self.watch(step["id"] if chain else "result", step["id"])
        if operator == "stream_table_join" and config["table"].get("materialized", True):
            self.watch("table", "table")
        self.emit_from(config["output"] if chain else "result")

    def watch(self, name: str, step: str) -> None:
        store = self.nodes[step].store
        assert store is not None
        self.watched = (name, store)

    def emit_from(self, step: str) -> None:
        node, emit = self.nodes[step], self.run.emit

        def emit_change(change: Change) -> None:
            emit(change.key, change.new, change.timestamp)

        node.listeners.append(emit_change if isinstance(node, Table) else lambda r: emit(*r))

    def add(self, step: Config) -> None:
        self.nodes[step["id"]] = self.node(step)

    def node(self, step: Config) -> Any:
        run, nodes, op, materialize = self.run, self.nodes, step["op"], step.get("materialize")
        if op == "table":
            return self.source(step["input"], Source(run, step["table"]))
        if op == "stream":
            return self.source(step["input"], Stream())
        if op == "filter":
            return Filter(run, nodes[step["from"]], step, materialize)
        if op == "map_values":
            return MapValues(run, nodes[step["from"]], step, materialize)
        if op == "aggregate":
            return Aggregate(run, nodes[step["from"]], step, materialize)
        if op == "suppress":
            return Suppress(run, nodes[step["from"]], step["suppress"])
        if op == "to_table":
            return self.to_table(nodes[step["from"]], Source(run, materialize))
        if op == "stream_table_join":
            stream, table = nodes[step["stream"]], nodes[step["table"]]
            return StreamTableJoin(run, stream, table, step["kind"], step["grace"])
        join = {"table_join": TableJoin, "foreign_key_join": ForeignKeyJoin}[op]
        return join(run, nodes[step["left"]], nodes[step["right"]], step["kind"], materialize)

    def source(self, topic: str, node: Any) -> Any:
        self.inputs.setdefault(topic, []).append(node.receive)
        return node

    def to_table(self, parent: Any, table: Source) -> Source:
        if isinstance(parent, Table):
            parent.listeners.append(lambda c: table.receive(Record(c.key, c.new, c.timestamp)))
        else:
            parent.listeners.append(table.receive)
        return table

    def feed(self, records: Iterable[Config]) -> None:
        for i, record in enumerate(records):
            self.run.trigger = i
            for receive in self.inputs.get(record["input"], ()):
                receive(Record(record["key"], record["value"], record["timestamp"]))
            self.run.drain()


def steps_of(operator: str, config: Config) -> Iterable[Config]:
    """The steps of a chain that is equal to an operator; the last step is ``result``."""
    result = {"id": "result", "op": operator, **config}
    result["materialize"] = config.get("materialize_result")
    if "left" in config:
        for side in ("left", "right"):
            yield {"id": side, "op": "table", "input": side, "table": config[side]}
        op = "foreign_key_join" if operator == "foreign_key_join" else "table_join"
        yield {**result, "op": op, "left": "left", "right": "right"}
        return
    yield {"id": "table", "op": "table", "input": "table", "table": config["table"]}
    if operator == "stream_table_join":
        yield {"id": "stream", "op": "stream", "input": "stream"}
        yield {**result, "stream": "stream", "table": "table"}
    else:
        yield {**result, "op": operator.removeprefix("table_"), "from": "table"}
