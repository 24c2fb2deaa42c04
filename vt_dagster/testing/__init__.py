"""Test a topology: records in, records out, on Spark, without files."""

from vt_dagster.testing.driver import REFUSED, TopologyTestDriver, VersionedStore

__all__ = ["REFUSED", "TopologyTestDriver", "VersionedStore"]
