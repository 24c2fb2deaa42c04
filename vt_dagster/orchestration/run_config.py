"""What a run's config may ask of the source that an asset reads."""

from typing import Any

import dagster as dg

from vt_dagster.runs.readiness import waits
from vt_dagster.sources.delta_source import DeltaSource
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.kafka_messages import as_ranges
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.sources.snapshot_source import SnapshotSource
from vt_dagster.topology.model import Stream


class SourceConfig(dg.Config):
    """The config of an asset with a source: what its ``pin`` is asked for."""

    def asked(self) -> dict[str, Any]:
        """Arguments of ``Source.pin``."""
        return self.model_dump()


class FilesConfig(SourceConfig):
    """Which files a run takes."""

    files: list[str] | None = None
    """Names in the source's directory; those consumed already are left out. None = all new ones."""

    def asked(self) -> dict[str, Any]:
        return {"only": self.files}


class TopicsConfig(SourceConfig):
    """Which records a run takes from its topics."""

    ranges: dict[str, Any] | None = None
    """``{topic: {"partition": [start, end]}}``; what was consumed already is left out. None = all."""
    accept_gap: bool = False
    """Go on where records are gone that were not consumed; the commit records which."""

    def asked(self) -> dict[str, Any]:
        return {"wanted": as_ranges(self.ranges), "accept_gap": self.accept_gap}


class VersionsConfig(SourceConfig):
    """Which versions a run takes of a Delta table."""

    version: int | None = None
    """The last one (inclusive); what was consumed already is left out. None = the newest."""
    accept_gap: bool = False
    """Go on where versions are gone that were not consumed; the commit records which."""
    accept_shrink: bool = False
    """Take a whole state that is empty, or deletes more than ``max_shrink``."""


class DumpConfig(SourceConfig):
    """Which dump a run takes."""

    dump: str | None = None
    """The name of the last one; one before it that was not consumed comes first. None = the next."""
    accept_shrink: bool = False
    """Take one that is empty, or deletes more than ``max_shrink``."""


class JoinConfig(SourceConfig):
    """Whether a run waits for tables to be ready."""

    accept_not_ready: bool = False
    """Join with tables that are not ready, or that have forgotten the times of records that waited; the
    commit records which."""


_CONFIGS: dict[type[Any], type[SourceConfig]] = {
    DeltaSource: VersionsConfig,
    FilesSource: FilesConfig,
    KafkaSource: TopicsConfig,
    SnapshotSource: DumpConfig,
}


def config_of(node: Stream) -> type[SourceConfig] | None:
    """The config that an asset takes; None where nothing can be asked of it."""
    if node.operator is not None:
        return JoinConfig if node.operator.waits_for and waits(node) else None
    source: object = node.source
    return next((_CONFIGS[kind] for kind in type(source).__mro__ if kind in _CONFIGS), None)
