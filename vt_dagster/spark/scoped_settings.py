"""Temporary settings of a Spark session."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping

from pyspark.sql import SparkSession

_lock = threading.Lock()
_inside: dict[tuple[int, frozenset[str]], tuple[int, dict[str, str | None]]] = {}
"""By session and group of settings: number of active contexts, and the values before the first one."""


@contextlib.contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Generator[None]:
    """Sets settings of a session, and restores the earlier values at the end.

    The settings apply to the whole session, so also to other threads that use it. Concurrent contexts
    must set either the same settings to the same values, or disjoint settings.
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
