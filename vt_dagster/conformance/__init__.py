"""Runs scenario files through the operators on Spark and compares with what they expect.

A scenario (``tests/conformance/FORMAT.md``) is a topology, its input records in order of arrival,
and the output of Kafka Streams. Scenarios whose topologies have the same structure run side by
side: each is a partition of its own, its number is part of every key, and durations are given per
partition.
"""

from vt_dagster.conformance.runner import conformance, run
from vt_dagster.conformance.scenario import Granularity, Report, Scenario, ScenarioOutcome

__all__ = ["Granularity", "Report", "Scenario", "ScenarioOutcome", "conformance", "run"]
