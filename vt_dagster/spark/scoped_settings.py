"""Settings of a Spark session that hold for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping

from pyspark.sql import SparkSession

_lock = threading.Lock()
_inside: dict[tuple[int, frozenset[str]], tuple[int, dict[str, str | None]]] = {}
"""Of each session and group of settings, how many are within, and what they were before the first."""


@contextlib.contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Generator[None]:
    """Within it the session has these settings; after it what it had before.

    They belong to the session: other threads that use it have them as well for that time. Threads that
    are within at once must want the same values of the same settings, or of others.
    """
    group = (id(spark), frozenset(values))
    with _lock:
        count, before = _inside.get(group, (0, {}))
        if not count:
            before = {key: spark.conf.get(key, None) for key in values}
            for key, value in values.items():
                spark.conf.set(key, value)
        _inside[group] = (count + 1, before)
    try:
        yield
    finally:
        with _lock:
            count, before = _inside.pop(group)
            if count > 1:
                _inside[group] = (count - 1, before)
            else:
                for key, value in before.items():
                    if value is None:
                        spark.conf.unset(key)
                    else:
                        spark.conf.set(key, value)
