"""The errors that this package raises.

A message says what was expected, what came instead, and what to do about it.
"""


class VtDagsterError(Exception):
    """Base class of every error that vt_dagster raises on purpose."""


class TopologyError(VtDagsterError):
    """A table, stream or operator is declared in a way that has no meaning; raised at load."""


class SparkUnavailableError(VtDagsterError):
    """No usable Spark session: Java, jars, the master or the session's settings are wrong."""


class SourceError(VtDagsterError):
    """An input cannot be read: a file, a topic, or a range of offsets that is gone."""


class ContractError(VtDagsterError):
    """Data breaks a schema or an invariant; nothing of it has been committed."""


class ConcurrentRunError(VtDagsterError):
    """Another run of the same asset has committed the same input first."""


class StorageError(VtDagsterError):
    """A log or a view on storage is missing, damaged or not what its asset declares."""


class ExecutorError(VtDagsterError):
    """A run is spread over processes in a way that DataFrames cannot follow."""
