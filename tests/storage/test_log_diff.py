"""A comparison of two logs finds exactly those read times at which the logs give different rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake

from vt_dagster.storage import delta, stale_reads
from vt_dagster.storage.arrow_reader import head_of, look_up
from vt_dagster.storage.commit_log import Commit, Shape
from vt_dagster.topology.durations import in_utc

MINUTE = 60_000_000
START = 1_577_836_800_000_000
TIMES = [START + n * MINUTE // 2 for n in range(80)]
VALUES = {
    "n": [None, 0, 1],
    "price": [None, 1.5, float("nan"), 0.0, -0.0],
    "tags": [None, ["x"], ["x", "y"]],
    "more": [None, "only one log has it"],
}
TYPES = {"n": pa.int32(), "price": pa.float64(), "tags": pa.list_(pa.string()), "more": pa.string()}


def write(warehouse: Path, name: str, records: list[dict[str, Any]], columns: list[str]) -> None:
    """Writes a log of two partitions, without a view."""
    offsets, stream_time = dict[int, int](), dict[int, int]()
    for row in records:
        home = ord(row["k"]) % 2
        row |= {"partition": home, "offset": offsets.get(home, 0)}
        offsets[home] = row["offset"] + 1
        stream_time[home] = max(stream_time.get(home, 0), row["timestamp"])
    times = pa.timestamp("us", "UTC")
    kinds = {"k": pa.string(), **{c: TYPES[c] for c in columns}, "timestamp": times}
    kinds |= {"partition": pa.int32(), "offset": pa.int64(), "is_tombstone": pa.bool_()}
    kinds |= {"is_latest": pa.bool_(), "recorded_at": times}
    rows = [{**row, "is_latest": True, "recorded_at": START} for row in records]
    shape = Shape(kind="versioned", key=["k"], history_retention=12 * MINUTE)
    document = Commit(
        asset=name,
        batch=1,
        attempt=name,
        log=name,
        shape=shape,
        next_offset=offsets,
        stream_time=stream_time,
    )
    about = {"userMetadata": json.dumps({delta.MARK: delta.with_format(document.model_dump())})}
    table = pa.Table.from_pylist([{c: row[c] for c in kinds} for row in rows], pa.schema(kinds))
    properties = CommitProperties(custom_metadata=about)
    write_deltalake(str(warehouse / name / "log"), table, commit_properties=properties)


def answer(warehouse: Path, name: str, moment: int) -> list[str]:
    """The rows of a read as of a time, without their partition and offset."""
    rows = look_up(str(warehouse), name, as_of=in_utc(moment), partial=True).to_pylist()
    own = ("k", "n", "price", "tags", "more", "valid_from")
    return sorted(
        repr([0.0 if row.get(c) == 0 and c == "price" else row.get(c) for c in own]) for row in rows
    )


def compared(warehouse: Path) -> Any:
    old, new = ((str(warehouse / name), *head_of(str(warehouse), name)) for name in ("old", "new"))
    return stale_reads.changed_answers(old, new, np.array(TIMES))


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.endurance) for seed in range(2, 12))]
)
def test_log_diff_equals_reads(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    records = list[dict[str, Any]]()
    for _ in range(30):
        row = {c: dice.choice(some) for c, some in VALUES.items()}
        moment = START + dice.randrange(36) * MINUTE
        records.append({**row, "k": dice.choice("abcd"), "timestamp": moment, "is_tombstone": False})
    for row in dice.sample(records, 6):
        row |= {"is_tombstone": True}
    other = [dict(row) for row in records]
    for place in dice.sample(range(len(other)), dice.randrange(4)):
        column = dice.choice(["n", "price", "tags", "is_tombstone", "timestamp"])
        later = other[place]["timestamp"] + MINUTE
        other[place][column] = {"is_tombstone": True, "timestamp": later}.get(column) or dice.choice(
            VALUES.get(column, [True])
        )
    less = seed % 2 == 0
    if less:
        for row in other:
            row["more"] = None
    write(tmp_path, "old", records, ["n", "price", "tags", "more"])
    write(tmp_path, "new", other, ["n", "price", "tags", *([] if less else ["more"])])
    found = compared(tmp_path).tolist()
    expected = [answer(tmp_path, "old", t) != answer(tmp_path, "new", t) for t in TIMES]
    assert found == expected


def test_log_diff_refuses_too_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        row = {"k": "a", "n": 1, "timestamp": START, "is_tombstone": False}
        write(tmp_path, name, [row], ["n"])
    assert compared(tmp_path).tolist() == [False] * len(TIMES)
    monkeypatch.setattr(stale_reads, "MOST", 1)
    assert compared(tmp_path) is None
