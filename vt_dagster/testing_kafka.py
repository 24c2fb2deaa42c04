"""A Kafka broker for tests and experiments; see ``vt_dagster.testing.kafka``."""

import sys

from vt_dagster.testing.kafka import KafkaBroker, main

__all__ = ["KafkaBroker"]

if __name__ == "__main__":
    main(*sys.argv[1:2])
