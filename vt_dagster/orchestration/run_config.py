"""The run config of an asset: which input of its source a run takes."""

from typing import Any

import dagster as dg

from vt_dagster.runs.pin import waits
from vt_dagster.sources.delta_source import DeltaSource
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.kafka_cluster import as_ranges
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.sources.snapshot_source import SnapshotSource
from vt_dagster.topology.model import Stream


class SourceConfig(dg.Config):
    """The config of an asset with a source: arguments of the source's ``pin``."""

    def asked(self) -> dict[str, Any]:
        """Returns the arguments of ``Source.pin``."""
        return self.model_dump()


class FilesConfig(SourceConfig):
    """Which files a run takes."""

    files: list[str] | None = None
    """Names in the source's directory; files already consumed are skipped. None = all new files."""

    def asked(self) -> dict[str, Any]:
        return {"only": self.files}


class TopicsConfig(SourceConfig):
    """Which records a run takes from its topics."""

    ranges: dict[str, Any] | None = None
    """``{topic: {"partition": [start, end]}}``; records already consumed are skipped. None = all."""
    accept_gap: bool = False
    """Continue after a gap of lost records that were not consumed; the commit records the gap."""

    def asked(self) -> dict[str, Any]:
        return {"wanted": as_ranges(self.ranges), "accept_gap": self.accept_gap}


class VersionsConfig(SourceConfig):
    """Which versions of a Delta table a run takes."""

    version: int | None = None
    """The last version (inclusive); versions already consumed are skipped. None = the newest."""
    accept_gap: bool = False
    """Continue after a gap of lost versions that were not consumed; the commit records the gap."""
    accept_shrink: bool = False
    """Accept a full snapshot that is empty, or deletes more than ``max_shrink``."""


class DumpConfig(SourceConfig):
    """Which dump a run takes."""

    dump: str | None = None
    """Name of the last dump; unconsumed dumps before it come first. None = the next."""
    accept_shrink: bool = False
    """Accept a dump that is empty, or deletes more than ``max_shrink``."""


class JoinConfig(SourceConfig):
    """Whether a run waits for tables to be ready."""

    accept_not_ready: bool = False
    """Join with tables that are not ready, or whose history retention no longer covers waiting records;
    the commit records which."""


_CONFIGS: dict[type[Any], type[SourceConfig]] = {
    DeltaSource: VersionsConfig,
    FilesSource: FilesConfig,
    KafkaSource: TopicsConfig,
    SnapshotSource: DumpConfig,
}


def config_of(node: Stream) -> type[SourceConfig] | None:
    """Returns the config class of an asset; None if it has no config."""
    if node.operator is not None:
        return JoinConfig if node.operator.waits_for and waits(node) else None
    source: object = node.source
    return next((_CONFIGS[kind] for kind in type(source).__mro__ if kind in _CONFIGS), None)
