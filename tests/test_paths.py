"""A path means the same in each process: definitions make it absolute, and a commit checks its
files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import fsspec
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
    WarehouseResource,
    build_definitions,
    build_export,
    build_maintenance,
    build_resources,
    build_training_set,
    read,
)
from vt_dagster.cli.run import load_topology
from vt_dagster.errors import SourceError, StorageError, StoreUnavailableError, TopologyError
from vt_dagster.orchestration.resources import warehouse_of
from vt_dagster.runs import what_if
from vt_dagster.runs.restate import require_free
from vt_dagster.sources.consumed_files import files_in
from vt_dagster.storage import parquet
from vt_dagster.storage.arrow_reader import asset_names
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.delta import address, filesystem, require_place, unseen
from vt_dagster.storage.maintenance import is_older, remove_unused
from vt_dagster.storage.stale_reads import remove_replaced

DAY = timedelta(days=1)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    about: dict[str, Any] = {"key": "k", "schema": RECORD, "timestamp": "at"}
    sources = [
        FilesSource("landing"),
        SnapshotSource("landing", dump_time="modified"),
        DeltaSource("landing"),
    ]
    assert {source.path for source in sources} == {str(tmp_path / "landing")}
    sales = Stream("sales", source=sources[0], **about)
    prices = VersionedTable("prices", source=sources[0], history_retention=DAY, **about)
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


def test_commit_with_files_on_other_machine_is_refused(
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


def test_file_missing_on_spark_server_is_reported(tmp_path: Path, spark: SparkSession) -> None:
    """The opposite case: this process sees a file that Spark does not see, and the message says so."""
    place = tmp_path / "prices.jsonl"
    with pytest.raises(Exception, match="PATH_NOT_FOUND") as raised:
        spark.read.text(str(place))
    assert unseen(raised.value) is None, "it is nowhere"
    place.write_text("{}")
    assert "expected Spark to see" in str(unseen(raised.value))


WRONG = {
    "": "name one: an empty path would be the working directory",
    " ": "name one: an empty path would be the working directory",
    "lake\n": "remove the white space at its beginning or end",
    " lake": "remove the white space at its beginning or end",
    "~/lake": "only a shell resolves a tilde",
    "foo://lake/x": "a URL that begins with s3a://, gs://, abfss://, hdfs:// or file:/, got 'foo://lake/x'",
    "S3://lake/x": "or install the package that makes 'S3' known to fsspec",
    "s3a:/lake/x": "or a URL such as s3a://bucket/folder or file:///folder, got 's3a:/lake/x'",
    "s3://": "or a URL such as s3a://bucket/folder or file:///folder, got 's3://'",
    "file:lake": "or a URL such as s3a://bucket/folder or file:///folder, got 'file:lake'",
    "file://host/lake": "or a URL such as s3a://bucket/folder or file:///folder",
    "C:/lake": "the text before the first colon is read as a protocol",
    "C:\\lake": "the text before the first colon is read as a protocol",
}
"""Paths that Spark, Python or a shell understand differently, with a part of the message."""


@pytest.mark.parametrize("path", WRONG)
def test_invalid_path_is_refused_when_definitions_load(path: str) -> None:
    about: dict[str, Any] = {"key": "k", "schema": RECORD, "timestamp": "at"}
    sales = Stream("sales", source=FilesSource("landing"), **about)
    prices = VersionedTable("prices", source=FilesSource("landing"), history_retention=DAY, **about)
    features = [FeatureView(prices, prefix="p_")]
    for made in (
        lambda: WarehouseResource(path=path),
        lambda: build_resources(path),
        lambda: build_definitions(sales, warehouse=path),
        lambda: build_export(sales, to=path),
        lambda: build_training_set(sales, features, name="training", to=path),
        lambda: build_maintenance(sales, exports=[path]),
    ):
        with pytest.raises(TopologyError) as raised:
            made()
        assert WRONG[path] in str(raised.value)
    for source in (FilesSource, DeltaSource, lambda path: SnapshotSource(path, dump_time="modified")):
        with pytest.raises(SourceError) as refused:
            source(path)
        assert (WRONG[path] if path.strip() else "expected the path or URL") in str(refused.value)


def test_invalid_path_of_environment_or_launchpad_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a variable, and the config of a run, are checked before anything is read."""
    monkeypatch.setenv("LAKE", "")
    sales = Stream("sales", key="k", schema=RECORD, timestamp="at", source=FilesSource("landing"))
    defs = build_definitions(sales, warehouse=dg.EnvVar("LAKE"))
    with pytest.raises(dg.DagsterResourceFunctionError) as raised:
        defs.resolve_implicit_global_asset_job_def().execute_in_process()
    assert "WarehouseResource: path: expected a directory or a URL, got ''" in str(
        raised.value.__cause__
    )
    defs = build_definitions(sales, warehouse=WarehouseResource.configure_at_launch())
    with pytest.raises(dg.DagsterResourceFunctionError) as raised:
        defs.resolve_implicit_global_asset_job_def().execute_in_process(
            run_config={"resources": {"vt_dagster_warehouse": {"config": {"path": "foo://lake"}}}}
        )
    assert "got 'foo://lake'" in str(raised.value.__cause__)
    context = SimpleNamespace(resources=SimpleNamespace(vt_dagster_warehouse=SimpleNamespace(path="")))
    with pytest.raises(StorageError, match="expected a directory or a URL, got ''"):
        warehouse_of(context, "vt_dagster")


def test_invalid_warehouse_of_command_is_refused() -> None:
    with pytest.raises(StorageError, match="only a shell resolves a tilde"):
        load_topology(None, "tests.test_components", "~/lake")


def test_protocols_that_need_a_package_are_accepted() -> None:
    """They are accepted when definitions load; the error without the package names it."""
    for url in (
        *("s3://lake/x", "s3a://lake/x", "s3n://lake/x", "gs://lake/x", "abfss://lake@one.net/x"),
        *("hdfs://name:9000/x", "memory://x", "file:/x", "file:///x", "/x", "x", "größe/a b", "a/b:c"),
    ):
        require_place(url)
        assert WarehouseResource(path=url).path == url
    assert WarehouseResource(path=Path("lake")).path == "lake"
    with pytest.raises(StorageError, match=r"expected a package with the file system of oss://lake"):
        filesystem("oss://lake")


def test_stores_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not connect to the endpoint URL")  # like botocore's, no OSError

    for name in ("ls", "find", "isdir"):
        monkeypatch.setattr(type(filesystem("memory://lake")[0]), name, refuse)
    got = "expected to list memory://lake.*, got: Could not connect to the endpoint URL; correct the"
    with pytest.raises(StoreUnavailableError, match=got):
        read("prices", warehouse="memory://lake")
    with pytest.raises(StoreUnavailableError, match=got):
        asset_names("memory://lake")
    with pytest.raises(SourceError, match=got):
        files_in("memory://lake", "*", "files")
    for name in ("attempts/x", "prices.replaced/y", "what_if/z"):
        filesystem("memory://lake")[0].makedirs(f"/lake/{name}", exist_ok=True)
    for use in (
        lambda: remove_unused("memory://lake/attempts", (), 0),
        lambda: is_older("memory://lake/attempts", DAY),
        lambda: remove_replaced("memory://lake", "prices", DAY),
        lambda: require_free("memory://lake", "prices"),
        lambda: what_if._place("memory://lake/what_if").__enter__(),
    ):
        with pytest.raises(StoreUnavailableError, match=got):
            use()

    def lacks_libraries(_: str) -> None:
        raise OSError("Unable to load libjvm\ndlopen(libjvm.so) failed")  # pyarrow's, for hdfs

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks_libraries)
    with pytest.raises(StorageError, match="expected the file system of hdfs://x, got: Unable to load"):
        filesystem("hdfs://x")


def test_store_that_stops_answering_while_dumps_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "part.jsonl").write_text("{}")
    source = SnapshotSource(str(tmp_path), dump_time="modified")
    (dump,) = source.dumps()
    calls, kind = list[str](), type(filesystem(str(tmp_path))[0])
    ls = kind.ls

    def answers_once(fs: Any, path: str, *args: Any, **about: Any) -> Any:
        calls.append(path)
        if len(calls) > 1:
            raise OSError("Connection timed out")
        return ls(fs, path, *args, **about)

    def refuse(*_: Any) -> Any:
        raise PermissionError("Access Denied")

    got = "expected to list .*, got: {}; correct the address"
    with monkeypatch.context() as patched:
        patched.setattr(kind, "ls", answers_once)
        with pytest.raises(SourceError, match=got.format("Connection timed out")):
            source.dumps()
    with monkeypatch.context() as patched:
        patched.setattr(kind, "modified", refuse)
        with pytest.raises(SourceError, match=got.format("Access Denied")):
            source.time_of(dump)
