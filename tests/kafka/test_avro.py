"""The Avro schema of a topic changes while its table is live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tests.kafka.topics import Topics
from tests.schema_registry import Registry, framed
from vt_dagster import Stream, Table
from vt_dagster.errors import StorageError
from vt_dagster.kafka import Avro, KafkaSource, SchemaRegistry
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

V1 = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "k", "type": "string"},
        {"name": "n", "type": "int"},
        {"name": "gone", "type": "string"},
        {"name": "name", "type": "string"},
    ],
}
V2 = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "label", "type": "string", "default": "none", "aliases": ["name"]},
        {"name": "k", "type": "string"},
        {"name": "n", "type": "long"},
    ],
}
"""The fields have another order; ``note`` is new, ``name`` is renamed, ``n`` is wider, ``gone`` is
left out."""
BIG = 2**40


def avro_long(value: int) -> bytes:
    rest, found = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*found, rest])


def avro_text(value: str) -> bytes:
    return avro_long(len(value)) + value.encode()


def first_schema_record(k: str, n: int, name: str) -> dict[str, Any]:
    return {
        "key": k,
        "value": framed(11, avro_text(k) + avro_long(n) + avro_text("g") + avro_text(name)),
    }


def second_schema_record(k: str, n: int, label: str, note: str | None) -> dict[str, Any]:
    said = avro_long(0) if note is None else avro_long(1) + avro_text(note)
    return {"key": k, "value": framed(12, said + avro_text(label) + avro_text(k) + avro_long(n))}


@pytest.fixture
def registry() -> Any:
    with Registry() as running:
        yield running


def test_avro_schema_change_on_live_table(
    topics: Topics, registry: Registry, tmp_path: Path, spark: SparkSession
) -> None:
    topic = topics.create()
    stores = stores_of(str(tmp_path), spark)

    def declared(name: str, *, after: bool, more: str) -> list[Stream]:
        label = "label" if after else "name"
        kinds = {"k": StringType(), "n": LongType() if after else IntegerType(), label: StringType()}
        added = [StructField(more, StringType())] if more else []
        table = Table(
            name,
            key="k",
            schema=StructType([*(StructField(n, kind) for n, kind in kinds.items()), *added]),
            source=KafkaSource(
                topics.cluster, topic, value=Avro(registry=SchemaRegistry(registry.url))
            ),
            renamed={"name": "label"} if after else {},
        )
        return [table, table.group_by(label).count(name=f"{name}_by_label")]

    def run(nodes: list[Stream]) -> None:
        for node in nodes:
            run_once(node, stores)

    registry.subjects[f"{topic}-value"] = [V1]
    topics.produce(topic, [first_schema_record("a", 1, "x"), first_schema_record("b", 2, "y")])
    before = declared("orders", after=False, more="gone")
    run(before)
    # The producers change first: the table ignores fields that it does not declare.
    registry.subjects[f"{topic}-value"].append(V2)
    topics.produce(topic, [second_schema_record("a", 3, "z", "lost")])
    run(before[:1])
    (row,) = AssetStore(str(tmp_path), before[0], spark).read().where("k = 'a'").collect()
    assert (row["n"], row["name"], row["gone"]) == (3, "z", None)
    # A column is removed in a separate run: beside a new column, it might be a rename.
    topics.produce(topic, [first_schema_record("b", 5, "y")])
    live, anew = (declared(name, after=True, more="note") for name in ("orders", "anew"))
    with pytest.raises(StorageError, match="gone is missing and note is new"):
        run(live)
    run(declared("orders", after=False, more=""))
    topics.produce(topic, [second_schema_record("d", BIG, "z", "new")])
    run(live)
    run(anew)
    for one, other in zip(live, anew, strict=True):
        for what in ("log", "current"):
            mine, theirs = (AssetStore(str(tmp_path), n, spark).read(what) for n in (one, other))
            # The live table has no ``note`` of records that came before the column was declared.
            names = [c for c in theirs.columns if c not in ("recorded_at", "note", "old")]
            names += ["old.label", "old.n"] if what == "log" and one is live[0] else []
            assert sorted(map(tuple, mine.select(*names).collect()), key=str) == sorted(
                map(tuple, theirs.select(*names).collect()), key=str
            )
    current = (
        AssetStore(str(tmp_path), live[0], spark).read().orderBy("k").select("k", "n", "label", "note")
    )
    assert list(map(tuple, current.collect())) == [
        ("a", 3, "z", None),
        ("b", 5, "y", None),
        ("d", BIG, "z", "new"),
    ]
    groups = AssetStore(str(tmp_path), live[1], spark).read()
    assert {r["label"]: r["count"] for r in groups.collect()} == {"x": 0, "y": 1, "z": 2}
