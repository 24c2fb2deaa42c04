"""`vt-dagster explore` on a large warehouse: the time from the command to its start page, and for the
page of a key.

Arrow and `deltalake` write the warehouse, in files as large as those of runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, write_deltalake
from measure import Outputs, Result, compare, take_turns

from vt_dagster.storage.delta import MARK, with_format

COMMAND = Path(sys.executable).parent / "vt-dagster"
SMALL, KEYS, FILE = 1_000, 10_000, 250_000
OPENS, SECONDS = "explore, from the command to its start page", 3.0


class Site:
    """The log of a versioned table: this number of versions, one per second, of at most ``KEYS``
    keys."""

    def __init__(self, versions: int, folder: Path) -> None:
        self.versions, self.warehouse = versions, folder
        path, last = str(folder / "prices" / "log"), 1_700_000_000 + versions
        for first in range(0, versions, FILE):
            end = min(first + FILE, versions)
            offset = np.arange(first, end)
            at = pa.array((1_700_000_000 + offset) * 1_000_000).cast(pa.timestamp("us", "UTC"))
            no = pa.array(np.zeros(end - first, bool))
            columns: dict[str, Any] = {
                "key": pa.array([f"k{n % KEYS}" for n in offset.tolist()]),
                "value": pa.array(offset * 0.5),
                "timestamp": at,
                "partition": pa.array(np.zeros(end - first, np.int32)),
                "offset": pa.array(offset),
                "is_tombstone": no,
                "is_latest": pa.array(np.ones(end - first, bool)),
                "recorded_at": at,
            }
            said = {
                "asset": "prices",
                "batch": first // FILE + 1,
                "attempt": str(first),
                "shape": {
                    "kind": "versioned",
                    "key": ["key"],
                    "columns": ["key", "value"],
                    "history_retention": 10**15,
                },
                "log": "log",
                "recorded_at": (1_700_000_000 + end) * 1_000_000,
                "next_offset": {0: end},
                "stream_time": {0: last * 1_000_000},
            }
            told = json.dumps({MARK: with_format(said)})
            about = CommitProperties(custom_metadata={"userMetadata": told})
            write_deltalake(path, pa.table(columns), mode="append", commit_properties=about)

    def open(self) -> dict[str, float]:
        """Starts a new process, and opens its start page, then a key's page."""
        start = time.perf_counter()
        command = [str(COMMAND), "explore", str(self.warehouse), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            page = self._get(address)
            opened = time.perf_counter() - start
            if f"{self.versions:,}" not in page:
                raise AssertionError(f"expected {self.versions:,} on the start page, got {page}")
            start = time.perf_counter()
            page = self._get(f"{address}/key/prices?key=k7")
            of_key = len(range(7, self.versions, KEYS))
            if f"of {of_key:,} records" not in page:
                raise AssertionError(f"expected {of_key:,} records of the key, got {page}")
            return {"start": opened, "key": time.perf_counter() - start}
        finally:
            process.terminate()
            process.wait(20)

    @staticmethod
    def _get(address: str) -> str:
        with urllib.request.urlopen(address, timeout=120) as answer:
            return answer.read().decode()


def run(versions: int, repeat: int, outputs: Outputs) -> tuple[list[Result], list[str]]:
    """Times a warehouse with this number of versions, compared with a small one."""
    large, small = (Site(n, Path(outputs.fresh(f"explore-{n}"))) for n in (versions, SMALL))
    times = take_turns({"ours": large.open, "small": small.open}, repeat)
    name, peer = f"{OPENS}, {versions:,} versions", f"the same of {SMALL:,}"
    results = [
        compare(name, versions, times["ours: start"], peer, times["small: start"], 1.3),
        compare(
            f"… a key's page, {versions:,} versions",
            versions,
            times["ours: key"],
            peer,
            times["small: key"],
            None,
        ),
    ]
    worst = max(times["ours: start"])
    within = "within" if worst <= SECONDS else "not within"
    return results, [f"explore: {versions:,} versions opened {within} {SECONDS:g} s ({worst:.2f} s)"]
