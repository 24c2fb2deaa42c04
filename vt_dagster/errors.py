"""The errors that this package raises.

A message says what was expected, what came instead, and what to do about it.
"""

from collections.abc import Sequence


class VtDagsterError(Exception):
    """Base class of every error that vt_dagster raises on purpose."""


class TopologyError(VtDagsterError):
    """A table, stream or operator is declared in a way that has no meaning; raised at load."""


class DefinitionsError(VtDagsterError):
    """A command or a YAML file names definitions that are not there, or not what it takes."""


class SparkUnavailableError(VtDagsterError):
    """No usable Spark session: Java, jars, the master or the session's settings are wrong."""


class SourceError(VtDagsterError):
    """An input cannot be read: a file, a topic, or a range of offsets that is gone."""


class RecordsGoneError(SourceError):
    """A topic has lost records that were not consumed, or is another one than before."""


class ContractError(VtDagsterError):
    """Data breaks a schema or an invariant; nothing of it has been committed."""


class ConcurrentRunError(VtDagsterError):
    """Another run of the same asset has committed the same input first."""


class ClockWarning(UserWarning):
    """A read as of a time of record leaves out records, since the clock of a run was ahead."""


class StorageError(VtDagsterError):
    """A log or a view on storage is missing, damaged or not what its asset declares."""


class ExecutorError(VtDagsterError):
    """A run is spread over processes in a way that DataFrames cannot follow."""


class RefusedRecordsError(VtDagsterError):
    """An operator cannot take some of a run's records; nothing was committed.

    Args:
        partitions: those of the records.
    """

    def __init__(self, message: str, partitions: Sequence[int]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


class BufferFullError(RefusedRecordsError):
    """A buffer with ``when_full='shut_down'`` holds more than its limit; nothing was committed."""


class NullArrayError(RefusedRecordsError):
    """The expression of ``flat_map_values`` gave null where it is to give an array."""
