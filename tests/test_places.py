"""A path means the same in each process: definitions make it absolute, and a commit checks its
files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.market import RECORD
from vt_dagster import (
    DeltaSource,
    FeatureView,
    FilesSource,
    SnapshotSource,
    Stream,
    VersionedTable,
    build_export,
    build_resources,
    build_training_set,
)
from vt_dagster.errors import StorageError
from vt_dagster.storage import parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.delta import address, unseen


def test_relative_paths_are_absolute_when_definitions_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    about: dict[str, Any] = {"key": "k", "schema": RECORD, "timestamp": "at"}
    sources = [
        FilesSource("landing"),
        SnapshotSource("landing", dump_time="modified"),
        DeltaSource("landing"),
    ]
    assert {source.path for source in sources} == {str(tmp_path / "landing")}
    sales = Stream("sales", source=sources[0], **about)
    prices = VersionedTable("prices", source=sources[0], history_retention=timedelta(days=1), **about)
    features = [FeatureView(prices, prefix="p_")]
    for made in (
        build_export(sales, to="lake"),
        build_training_set(sales, features, name="training", to="lake"),
    ):
        (metadata,) = made.metadata_by_key.values()
        assert metadata["dagster/uri"] == str(tmp_path / "lake")
    assert build_resources("data")["vt_dagster_warehouse"].path == str(tmp_path / "data")
    assert AssetStore("data", sales).log_path == str(tmp_path / "data" / "sales" / "log")
    for url in ("s3a://lake/x", "file:///x", "memory://x", "/x"):
        assert address(url) == url
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")  # the same relative path is another directory now
    assert build_resources("data")["vt_dagster_warehouse"].path == str(tmp_path / "other" / "data")


def test_a_commit_whose_files_are_elsewhere(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is refused if a Spark server on another machine wrote the files to its own disk."""
    write, path = parquet._write_files, str(tmp_path / "table")  # pyright: ignore[reportPrivateUsage]

    def elsewhere(rows: Any, folder: str, parted: bool) -> None:
        write(rows, folder.replace(str(tmp_path), str(tmp_path / "server")), parted)

    monkeypatch.setattr(parquet, "_write_files", elsewhere)
    about: dict[str, Any] = {"document": {"batch": 1, "attempt": "a"}, "batch": 1, "asset": "prices"}
    with pytest.raises(StorageError, match=r"prices: expected the files that Spark has written to"):
        parquet.write(spark.range(3), path, **about)
    assert not Path(path, "_delta_log").exists()


def test_a_file_that_spark_does_not_find(tmp_path: Path, spark: SparkSession) -> None:
    """The opposite case: this process sees a file that Spark does not see, and the message says so."""
    place = tmp_path / "prices.jsonl"
    with pytest.raises(Exception, match="PATH_NOT_FOUND") as raised:
        spark.read.text(str(place))
    assert unseen(raised.value) is None, "it is nowhere"
    place.write_text("{}")
    assert "expected Spark to see" in str(unseen(raised.value))
