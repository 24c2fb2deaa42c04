"""What all tests share: one Spark session, and tables that were really written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.market import Market, healthy_market
from vt_dagster.session import build_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A small local session, one for all tests."""
    session = build_session(
        "vt_dagster tests",
        master="local[2]",
        conf={
            "spark.sql.shuffle.partitions": "2",
            # Many short queries: compiling them well takes longer than running them.
            "spark.driver.extraJavaOptions": ("-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"),
            "spark.python.sql.dataFrameDebugging.enabled": "false",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def market(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Market:
    """A topology after two runs; only to be looked at: change a copy of it."""
    return healthy_market(tmp_path_factory.mktemp("market"), spark)
