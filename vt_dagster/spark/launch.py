"""Starts a JVM for Spark: no output if it works, a one-line reason if it fails."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vt_dagster.errors import SparkUnavailableError

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway


def not_started(target: str, reason: str) -> SparkUnavailableError:
    return SparkUnavailableError(
        f"Expected a Spark session on {target}, got: {reason.rstrip('.')}. "
        "Check the address and the Spark settings."
    )


@contextlib.contextmanager
def quiet_start(target: str) -> Iterator[Any]:
    """Yields a launcher for the JVM; holds the JVM's stderr back until the session exists.

    If the start fails, one line of the JVM's output becomes the error, and the rest is dropped.
    """
    from pyspark.java_gateway import launch_gateway

    stderr: _JvmStderr | None = None

    def launch(conf: Any) -> JavaGateway:
        nonlocal stderr
        stderr = _JvmStderr()
        with stderr.writer() as handle:
            return launch_gateway(conf, popen_kwargs={"stderr": handle})

    try:
        yield launch
    except Exception as error:
        # In these two cases the exception names a consequence only; the JVM's output has the cause.
        next_only = re.search("JAVA_GATEWAY_EXITED|stopped SparkContext", str(error))
        said = stderr.reason() if stderr and next_only else ""
        if stderr:
            stderr.release(drop=True)
        if said:
            raise not_started(target, said) from None
        raise
    if stderr:
        stderr.release()


class _JvmStderr:
    """Copies the JVM's stderr to this process's stderr, without one useless warning."""

    _NOISE = b"WARNING: Using incubator modules"
    _OPTIONS = re.compile(r"(NOTE: )?Picked up J\w+_OPTIONS")

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._held: collections.deque[bytes] | None = collections.deque(maxlen=2000)
        self._thread = threading.Thread(target=self._copy, name="spark-stderr", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def writer(self) -> Iterator[int]:
        """Yields the descriptor for the JVM; closes this process's copy at the end."""
        try:
            yield self._write
        finally:
            os.close(self._write)

    def release(self, drop: bool = False) -> None:
        """Writes the held lines (or drops them), and copies all later lines at once."""
        with self._lock:
            held, self._held = self._held or (), None
            if not drop:
                for line in held:
                    os.write(2, line)

    def reason(self) -> str:
        """Returns the first line of the JVM's own output, without the prefix of a log line."""
        self._thread.join(timeout=2)  # the thread ends when the JVM has ended
        with self._lock:
            lines = [line.decode(errors="replace").strip() for line in self._held or ()]
        first = next((line for line in lines if line and not self._OPTIONS.match(line)), "")
        return re.sub(r'^(Exception in thread "\w+"|\S+ \S+ ERROR \w+:) ', "", first)

    def _copy(self) -> None:
        # os.write, not sys.stderr: a daemon thread must not hold its lock when Python exits.
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                if line.startswith(self._NOISE):
                    continue
                with self._lock:
                    if self._held is not None:
                        self._held.append(line)
                    else:
                        with contextlib.suppress(OSError):
                            os.write(2, line)
