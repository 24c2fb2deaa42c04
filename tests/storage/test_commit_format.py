"""Each reader refuses commits in another format, and names the release that wrote them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import vt_dagster
from tests.log_writer import LogWriter, document
from vt_dagster.errors import StorageError
from vt_dagster.explore.warehouse_overview import overview
from vt_dagster.provenance.explain import explain
from vt_dagster.storage import commit_log, delta
from vt_dagster.storage.arrow_reader import head_of


def edit(log: Path, version: int, **changes: Any) -> None:
    """Changes entries of a commit's document on disk; None removes an entry."""
    path = log / "_delta_log" / f"{version:020d}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for info in (line["commitInfo"] for line in lines if "commitInfo" in line):
        metadata = json.loads(info["userMetadata"])
        found = {**metadata[delta.MARK], **changes}
        metadata[delta.MARK] = {name: value for name, value in found.items() if value is not None}
        info["userMetadata"] = json.dumps(metadata)
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    prices = LogWriter(tmp_path)
    prices.run([("apple", "1", 0)], recorded=1)
    prices.run([("apple", "2", 5)], recorded=6)
    return prices.path


def readers(warehouse: str) -> dict[str, Any]:
    return {
        "head": lambda: head_of(warehouse, "prices"),
        "rows": lambda: vt_dagster.read("prices", warehouse=warehouse),
        "explain": lambda: explain("prices", key="apple", warehouse=warehouse),
    }


@pytest.mark.parametrize("reader", readers(""))
@pytest.mark.parametrize(
    ("changes", "found", "author"),
    [
        ({"format": 2, "release": "9.9.0"}, "2", "vt_dagster 9.9.0"),
        ({"format": None, "release": None}, "None", "an unreleased version"),
    ],
)
def test_other_commit_format_is_refused(
    log: Path, reader: str, changes: dict[str, Any], found: str, author: str
) -> None:
    edit(log, 1, **changes)
    with pytest.raises(StorageError) as refused:
        readers(str(log.parent.parent))[reader]()
    assert str(refused.value) == (
        f"prices: expected commits in format {delta.FORMAT}, which vt_dagster {delta.release()} reads, "
        f"got format {found} in version 1 of {log}, written by {author}; nothing was read. Use that "
        f"release, or move {log.parent} away and materialize the asset again"
    )


def test_other_assets_stay_readable(log: Path) -> None:
    LogWriter(log.parent.parent, "rates").run([("usd", "1", 0)], recorded=1)
    edit(log, 1, format=2, release="9.9.0")
    found = {one.name: one.trouble for one in overview(str(log.parent.parent))}
    assert found["rates"] == ""
    assert "written by vt_dagster 9.9.0" in found["prices"]


def test_archived_commits_in_other_format_are_refused(log: Path) -> None:
    root = str(log.parent)
    commit_log.keep(root, [0])
    (kept,) = (log.parent / "commits").glob("*.json.gz")
    assert [one.batch for one in commit_log.commits(root)] == [1, 2]
    told = [{**one, "format": 2} for one in json.loads(gzip.decompress(kept.read_bytes()))]
    kept.write_bytes(gzip.compress(json.dumps(told).encode()))
    with pytest.raises(StorageError, match=re.escape(f"the archived commits {kept.name}")):
        list(commit_log.commits(root))


def test_commit_names_its_release() -> None:
    said = document("prices", 1, 0, {}, {})
    assert (said["format"], said["release"]) == (delta.FORMAT, delta.release())
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", delta.release())
    copied = delta.with_format({**said, "release": "0.0.1"})
    assert copied["release"] == delta.release()
