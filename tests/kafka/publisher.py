"""Publishes COUNT records to each of two topics: ``SERVERS PRICES SALES COUNT``. A thousandth is
poison. Before the second half, the program waits for stdin, so that runs begin before it ends."""

from __future__ import annotations

import random
import sys
import time

from confluent_kafka import Producer


def main() -> None:
    servers, *topics, number = sys.argv[1:]
    count = int(number)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, "enable.idempotence": True})
    chance = random.Random(7)
    start = 1_700_000_000_000
    for n in range(count):
        # out of order by up to 15 minutes, some by an hour, which is late for the table
        millis = start + n * 20 - chance.randrange(900_000) - (3_600_000 if n % 500 == 0 else 0)
        key = f"k{chance.randrange(2000)}"
        value = f'{{"k": "{key}", "n": {n}, "millis": {millis}}}' if n % 1000 else "poison"
        for topic in topics:
            while True:
                try:
                    producer.produce(topic, key=key, value=value)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.poll(0)
        if n == count // 2:
            assert producer.flush(120) == 0
            sys.stdin.readline()
        if n > count // 2 and n % (count // 100) == 0:
            time.sleep(0.04)
    assert producer.flush(120) == 0


if __name__ == "__main__":
    main()
