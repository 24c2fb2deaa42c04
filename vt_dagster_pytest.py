"""Fixtures for tests of topologies; pytest finds them by itself where vt_dagster is installed.

- ``topology``: ``driver = topology(priced_orders)`` gives a
  :class:`~vt_dagster.testing.TopologyTestDriver` of its own for each test.
- ``spark``: the session that the drivers use, one for all tests. A fixture ``spark`` of your own, in a
  conftest.py, takes its place.
"""

# pytest imports this at each start, for whatever tests. So it lies beside the package, whose import
# brings Dagster and PySpark along (2 s), and imports the package only in a fixture.
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from vt_dagster.testing import TopologyTestDriver
    from vt_dagster.topology.model import Stream


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local Spark session with Delta Lake, two cores, UTC, or what VT_DAGSTER_SPARK names: one for
    all tests."""
    from vt_dagster.spark.server import resolve_remote
    from vt_dagster.spark.session import FEW_QUERIES, build_session

    remote = resolve_remote(None)
    conf = {"spark.sql.shuffle.partitions": "2", **({} if remote else FEW_QUERIES)}
    session = build_session("vt_dagster tests", master="local[2]", remote=remote, conf=conf)
    yield session
    session.stop()


@pytest.fixture
def topology(spark: SparkSession) -> Callable[..., TopologyTestDriver]:
    """Makes a driver for some streams and tables; their inputs come along."""
    from vt_dagster.testing import TopologyTestDriver

    def of(*nodes: Stream) -> TopologyTestDriver:
        return TopologyTestDriver(*nodes, spark=spark)

    return of
