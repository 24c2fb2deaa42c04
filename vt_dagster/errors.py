"""The errors that this package raises, and numbers in messages.

A message states what was expected, what was found, and how to fix it.
"""

from collections.abc import Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a number with what it counts: ``1 row``, ``1,234 rows``.

    Args:
        many: the plural, if it is not ``one`` with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


class VtDagsterError(Exception):
    """Base class of every error that vt_dagster raises on purpose."""


class TopologyError(VtDagsterError):
    """A table, stream or operator has an invalid declaration; raised when definitions load."""


class DefinitionsError(VtDagsterError):
    """A command or a YAML file names definitions that do not exist, or of the wrong kind."""


class SparkUnavailableError(VtDagsterError):
    """No usable Spark session: Java, jars, the master or the session's settings are wrong."""


class SourceError(VtDagsterError):
    """An input cannot be read: a file, a topic, or a range of offsets that is gone."""


class RecordsGoneError(SourceError):
    """A topic lost records that were not consumed, or was deleted and created again."""


class ContractError(VtDagsterError):
    """Data breaks a schema or an invariant; nothing was committed."""


class ConcurrentRunError(VtDagsterError):
    """Another run committed the same input first, or the log was replaced; nothing was committed."""


class ClockWarning(UserWarning):
    """A read as of a system time leaves out records, because the clock of a run was ahead."""


class StorageError(VtDagsterError):
    """A log or a view on storage is missing or damaged, or does not match its asset's declaration."""


class StoreUnavailableError(VtDagsterError, OSError):
    """A store cannot be reached, or refuses the credentials. It is no StorageError, because the tables
    may be intact."""


class NeedsReplayError(StorageError):
    """A log cannot continue with a changed declaration, because it would mix two results. Replay the
    asset under another name, and swap."""


class ExecutorError(VtDagsterError):
    """The executor spreads a run over processes, between which DataFrames cannot be passed."""


class RefusedRecordsError(VtDagsterError):
    """An operator rejects some of a run's records; nothing was committed.

    Args:
        partitions: the partitions of these records.
    """

    def __init__(self, message: str, partitions: Sequence[int]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


class BufferFullError(RefusedRecordsError):
    """A buffer with ``when_full='shut_down'`` holds more than its limit; nothing was committed."""


class NullArrayError(RefusedRecordsError):
    """The expression of ``flat_map_values`` returned null instead of an array."""
