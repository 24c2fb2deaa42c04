"""Runs scenario files through the operators on Spark and compares the output with Kafka Streams'.

A scenario (``tests/conformance/FORMAT.md``) is a topology, its input records in order of arrival, and
the output of Kafka Streams. Scenarios with topologies of the same structure run side by side: each is
one partition, its number is part of every key, and durations are set per partition.
"""

from vt_dagster.conformance.runner import conformance, run
from vt_dagster.conformance.scenario import Granularity, Report, Scenario, ScenarioOutcome

__all__ = ["Granularity", "Report", "Scenario", "ScenarioOutcome", "conformance", "run"]
