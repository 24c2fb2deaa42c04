"""Tests of topologies on Spark: pipe records in, read records out, without files."""

from vt_dagster.testing.driver import REFUSED, TopologyTestDriver, VersionedStore

__all__ = ["REFUSED", "TopologyTestDriver", "VersionedStore"]
