"""``python -m examples.kafka``: starts a broker, sends messages, runs twice, and reads the result."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime, timezone
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.table import Table

from examples.kafka.definitions import DATA, ORDERS, PRICED, PRICES, defs
from vt_dagster.testing_kafka import KafkaBroker

DAY = "2026-03-02"


def price(product: str, amount: float, at: str) -> dict[str, Any]:
    return _message(PRICES, product, {"product": product, "price": amount, "at": f"{DAY}T{at}:00Z"})


def deleted(product: str, at: str) -> dict[str, Any]:
    """A tombstone: it has no value, so its timestamp is that of the message."""
    moment = datetime.fromisoformat(f"{DAY}T{at}:00").replace(tzinfo=timezone.utc)
    return _message(PRICES, product, None) | {"timestamp": int(moment.timestamp() * 1000)}


def order(number: int, product: str, at: str) -> dict[str, Any]:
    about = {"order_id": number, "product": product, "at": f"{DAY}T{at}:00Z"}
    return _message(ORDERS, product, about)


def _message(topic: str, key: str, value: Any) -> dict[str, Any]:
    return {"topic": topic, "key": key, "value": None if value is None else json.dumps(value)}


FIRST = [
    *(price("apple", 1.0, "10:00"), price("apple", 1.5, "12:00"), price("pear", 3.0, "09:00")),
    *(order(1, "apple", "11:00"), order(2, "pear", "11:10")),
]
SECOND = [
    *(price("apple", 1.2, "10:30"), deleted("pear", "11:05")),
    *(order(3, "apple", "13:30"), {"topic": ORDERS, "key": "apple", "value": "not JSON"}),
]
"""The messages after the first run; the first two were valid before the orders of that run."""


def send(servers: str, messages: list[dict[str, Any]]) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for message in messages:
        producer.produce(**message)
    producer.flush(30)


def make() -> dict[str, Any]:
    """Runs all assets; returns the metadata of each, by name."""
    run = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    )
    assert run.success
    return {
        event.asset_key.to_user_string(): event.materialization.metadata
        for event in run.get_asset_materialization_events()
        if event.asset_key is not None
    }


def published(servers: str) -> list[dict[str, Any]]:
    """The records of the topic to which the join is published."""
    about = {"bootstrap.servers": servers, "group.id": "example", "enable.partition.eof": True}
    consumer = Consumer(about)
    consumer.assign([TopicPartition(PRICED, 0, 0)])
    found: list[dict[str, Any]] = []
    try:
        while (message := consumer.poll(30)) is not None and message.error() is None:
            found.append(json.loads(message.value() or b"null"))
    finally:
        consumer.close()
    return found


def show(records: list[dict[str, Any]], said: dict[str, Any]) -> None:
    table = Table("order", "product", "at", "price", "valid from")
    for one in sorted(records, key=lambda record: record["order_id"]):
        began = one["priced_from"]
        told = [str(one["order_id"]), one["product"], one["at"][11:16], str(one["price"])]
        table.add_row(*told, "-" if began is None else began[11:16])
    Console().print(table)
    print(f"orders: {said['orders']['at_a_glance'].value}")
    print(f"priced_orders: {said['priced_orders']['at_a_glance'].value}")


def walk(servers: str) -> None:
    """Does all steps with a running broker."""
    os.environ["EXAMPLE_KAFKA"] = servers
    admin = AdminClient({"bootstrap.servers": servers})
    topics = [NewTopic(name, 1, 1) for name in (PRICES, ORDERS, PRICED)]
    for made in admin.create_topics(topics).values():
        made.result(30)
    send(servers, FIRST)
    make()
    send(servers, SECOND)
    said = make()
    show(published(servers), said)


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    with KafkaBroker(DATA / "broker") as broker:
        walk(broker.bootstrap_servers)


if __name__ == "__main__":
    main()
