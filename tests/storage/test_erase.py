"""An erase removes a key from every file, and changes no read of other keys; a second erase completes
an interrupted one."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType
from typer.testing import CliRunner

from vt_dagster import FilesSource, Stream, TumblingWindow, VersionedTable
from vt_dagster.cli import app
from vt_dagster.errors import ConcurrentRunError, NeedsReplayError, StorageError
from vt_dagster.runs import erase as erasure
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import FOLDER, Certificate, Key, erase, in_statistics
from vt_dagster.runs.export import Export, ExportRun, export_of
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.runs.training_set_run import TrainingRun
from vt_dagster.storage import delta, parquet, rewrite
from vt_dagster.storage.arrow_reader import head_of, look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit, Shape, commits
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.feature_views import FeatureView, TrainingSet
from vt_dagster.topology.model import Table

pytestmark = pytest.mark.usefixtures("few_rows")

ERIN, NAME = "erin-6b1f2a", "Erin-Somebody-91"
OTHERS = ["ada", "bob", "cyd"]
EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)


def schema(*names: str) -> StructType:
    texts = [StructField(name, StringType()) for name in names]
    return StructType([*texts, StructField("timestamp", TimestampType())])


class Shop:
    """Customers, their orders and items, and assets derived from them, with the same or another key."""

    def __init__(self, root: Path, **customers: Any) -> None:
        self.root, self.warehouse = root, str(root / "warehouse")
        self.customers = VersionedTable(
            "customers",
            key="customer",
            schema=schema("customer", "name", "city"),
            tombstone="name is null",
            history_retention=timedelta(minutes=40),
            source=FilesSource(str(root / "landing" / "customers"), max_bad_share=1.0),
            **customers,
        )
        self.orders = Stream(
            "orders",
            key="customer",
            schema=schema("customer", "note"),
            source=FilesSource(str(root / "landing" / "orders")),
        )
        self.items = VersionedTable(
            "items",
            key="item",
            schema=schema("item", "owner"),
            history_retention=timedelta(minutes=40),
            source=FilesSource(str(root / "landing" / "items")),
        )
        self.placed = self.orders.left_join(
            self.customers,
            name="placed",
            select=["left.*", "right.name as buyer"],
            grace_period=timedelta(minutes=5),
        )
        self.owned = self.items.left_join(
            self.customers, foreign_key="owner", name="owned", select=["left.*", "right.name"]
        )
        self.cities = self.customers.group_by("city").count(name="cities")
        window = TumblingWindow(timedelta(minutes=10), grace=timedelta(minutes=5))
        self.hourly = self.orders.group_by().windowed_by(window).count(name="hourly")
        self.nodes: list[Stream] = [
            *(self.customers, self.orders, self.items),
            *(self.placed, self.owned, self.cities, self.hourly),
        ]

    def land(self, name: str, file: str, records: list[dict[str, Any]]) -> None:
        folder = self.root / "landing" / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({**one, "timestamp": (EPOCH + timedelta(minutes=one["timestamp"])).isoformat()})
            for one in records
        ]
        (folder / file).write_text("\n".join(lines) + "\n")

    def land_some(self, chance: random.Random, place: int) -> None:
        """Lands random records of all customers: out of order, late, and deletions."""
        who = [ERIN, *OTHERS]

        def moment() -> float:
            return 20 * place + chance.randint(-25 if place else 0, 20)

        people = [(c, NAME if c == ERIN else c.upper()) for c in chance.choices(who, k=12)]
        self.land(
            "customers",
            f"{place}.jsonl",
            [
                {
                    "customer": c,
                    "name": None if chance.random() < 0.2 else f"{name} {place}",
                    "city": chance.choice(["rome", "bern"]),
                    "timestamp": moment(),
                }
                for c, name in people
            ]
            # one that is late, and one with a null key
            + [{"customer": ERIN, "name": NAME, "city": "rome", "timestamp": -600}] * (place > 0)
            + [{"customer": None, "name": "nobody", "city": "rome", "timestamp": 1}],
        )
        orders = [{"customer": c, "note": f"of {c}", "timestamp": moment()} for c in who * 2]
        self.land("orders", f"{place}.jsonl", orders)
        items = [
            {"item": f"i{n}", "owner": chance.choice(who), "timestamp": moment()} for n in range(4)
        ]
        self.land("items", f"{place}.jsonl", items)

    def run(self, spark: SparkSession, *nodes: Stream) -> None:
        for node in nodes or self.nodes:
            run_once(node, stores_of(self.warehouse, spark))

    def erase(self, spark: SparkSession, node: Stream, **more: Any) -> Certificate:
        about: dict[str, Any] = {"key": [ERIN], "reason": "asked to", "among": self.nodes, **more}
        return erase(self.warehouse, node, spark, **about)

    def answers(self) -> dict[str, list[Any]]:
        """All rows that reads of the tables return for others, now and as known at each commit."""
        found: dict[str, list[Any]] = {}
        for node in self.nodes:
            when = [c.recorded_at for c in commits(f"{self.warehouse}/{node.name}") if not _erase(c)]
            kinds = ["log"] + ["current"] * isinstance(node, Table) + ["versions"] * node.versioned
            for what in kinds:
                for known in (None, *(in_utc(moment) for moment in when)):
                    rows = look_up(self.warehouse, node.name, what, as_known_at=known)
                    found[f"{node.name} {what} {known}"] = _of_others(rows)
        return found

    def findings(self, spark: SparkSession, *nodes: Stream) -> list[Any]:
        found = [
            (node.name, one)
            for node in nodes or self.nodes
            for one in audit(AssetStore(self.warehouse, node, spark))
        ]
        return [one for one in found if not one[1].passed]


def _erase(commit: Any) -> bool:
    return (commit.run_id or "").startswith("erase:")


def _of_others(rows: pa.Table) -> list[Any]:
    whose = [c for c in ("customer", "owner") if c in rows.column_names]
    found = [row for row in rows.to_pylist() if all(row[c] not in (ERIN, None) for c in whose)]
    for row in found:
        if isinstance(row.get("old"), dict) and row["old"].get("owner") in (ERIN, None):
            row["old"] = None  # the item was hers before
    return sorted(map(repr, found))


def files_with_key(folder: Path, *without: str) -> list[str]:
    """The files below a folder that contain the key or a value of hers, as bytes or after decoding."""
    found: list[str] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        place = str(path.relative_to(folder))
        if place.split("/")[0] in without:
            continue
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content += gzip.decompress(content)
        if path.name.endswith(".parquet"):
            content += repr(pq.read_table(path, partitioning=None).to_pylist()).encode()
        if any(text.encode() in content for text in (ERIN, NAME)):
            found.append(place)
    return found


@pytest.fixture(scope="module")
def shop_template(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Shop:
    shop, chance = Shop(tmp_path_factory.mktemp("shop")), random.Random(7)
    shop.land_some(chance, 0)
    shop.run(spark)
    shop.land_some(chance, 1)
    shop.run(spark, shop.customers, shop.orders, shop.items)
    # the statistics of a compacted file contain the key
    DeltaTable(f"{shop.warehouse}/customers/quarantine").optimize.compact()
    return shop


@pytest.fixture
def shop(shop_template: Shop, tmp_path: Path) -> Shop:
    return _copy(shop_template, tmp_path)


def _copy(made: Shop, root: Path) -> Shop:
    shutil.copytree(made.root / "warehouse", root / "warehouse")
    copy = Shop(root)
    (root / "landing").symlink_to(made.root / "landing")
    return copy


@dataclass
class Erased:
    """The shop after an erase of a customer.

    Args:
        before: the answers about others before the erase; ``exported``: their rows, by export.
    """

    shop: Shop
    exports: list[Export]
    before: dict[str, list[Any]]
    exported: dict[str, list[Any]]
    done: Certificate


@pytest.fixture(scope="module")
def erased(
    shop_template: Shop, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Erased:
    shop = _copy(shop_template, tmp_path_factory.mktemp("erased"))
    exports = [
        export_of(shop.customers, "versions", str(shop.root / "exported" / "customers")),
        export_of(shop.placed, "log", str(shop.root / "exported" / "placed")),
    ]
    for export in exports:
        ExportRun(export, shop.warehouse, spark).run()
    exported = {e.to: _of_others(delta.require_table(e.to).to_pyarrow_table()) for e in exports}
    assert any(
        place.startswith("customers/quarantine/_delta_log")
        for place in files_with_key(shop.root / "warehouse")
    )
    before = shop.answers()
    done = shop.erase(spark, shop.customers, exports=[exports[0].to])
    return Erased(shop, exports, before, exported, done)


def test_erase_certificate(erased: Erased, spark: SparkSession) -> None:
    shop, done = erased.shop, erased.done
    (path,) = (shop.root / "warehouse" / FOLDER).glob("*.json")
    told = json.loads(path.read_text())
    assert told == json.loads(done.model_dump_json())
    assert ERIN not in path.read_text()
    assert told["reason"] == "asked to"
    assert told["searched"]["customers/log"]["erased"] > 0
    assert told["searched"]["customers/quarantine"]["erased"] > 0
    assert "owned/view" in told["searched"]
    assert set(told["kept"]) == {"cities"}
    assert any(line.startswith("items: ") and "owner" in line for line in told["elsewhere"])
    assert any(line.startswith("orders: ") for line in told["elsewhere"])
    landing, events, _ = told["unreachable"]
    assert re.search(
        r"in 2 of 2 in .*landing/customers, 0.jsonl \(\d rows\), 1.jsonl \(\d rows\): del", landing
    )
    assert "customers with its checks versions_do_not_overlap, " in events
    assert "dagster asset wipe customers placed " in events
    assert {*told["statistics"].values()} == {0}
    assert "customers/quarantine" in told["statistics"]
    lines: list[str] = []
    with pytest.raises(StorageError, match="got none of"):
        restate(shop.warehouse, shop.customers, EPOCH, spark, (), lines.append, dry_run=True)
    assert re.match(r"! customers: \d+ rows were erased .* they come back", lines[0])
    # a second erase finds no rows, and its certificate says so
    again = shop.erase(spark, shop.customers)
    assert again.id != done.id
    assert {one.erased for one in again.searched.values()} == {0}


def test_erase_leaves_no_byte_and_changes_no_other_read(erased: Erased, spark: SparkSession) -> None:
    shop, exports, warehouse = erased.shop, erased.exports, Path(erased.shop.warehouse)
    assert erased.done.finished
    assert shop.erase(spark, shop.orders, exports=[exports[1].to]).finished
    assert files_with_key(warehouse, "items") == []
    assert files_with_key(shop.root / "exported") == []
    for export in exports:
        table = delta.require_table(export.to)
        assert _of_others(table.to_pyarrow_table()) == erased.exported[export.to]
        assert (table.protocol().min_reader_version, table.protocol().reader_features) == (1, None)
        assert not [name for name in table.metadata().configuration if "columnMapping" in name]
        rows = table.to_pyarrow_table().num_rows
        assert pl.read_delta(export.to).height == rows
        assert spark.read.format("delta").load(export.to).count() == rows
        assert ExportRun(export, shop.warehouse, spark).run() is None
    assert shop.answers() == erased.before
    assert shop.findings(spark, shop.customers, shop.orders, shop.items, shop.cities) == []
    # runs consume the rest of the input without her records, and the record counts still add up
    behind = (shop.placed, shop.owned, shop.hourly)
    shop.run(spark, *behind)
    assert shop.findings(spark, *behind) == []
    replay(shop.warehouse, shop.hourly, "hourly_anew", spark)
    anew, live = (head_of(shop.warehouse, name)[1] for name in ("hourly_anew", "hourly"))
    assert anew.totals["erased"] == head_of(shop.warehouse, "orders")[1].erased[0]
    assert 0 < live.totals["erased"] < anew.totals["erased"]
    (shop.root / "landing").unlink()
    shop.land("orders", "2.jsonl", [{"customer": "ada", "note": "of ada", "timestamp": 40}])
    shop.run(spark, shop.orders, shop.hourly)
    assert shop.findings(spark, shop.orders, shop.hourly) == []
    assert files_with_key(warehouse, "items") == []


def test_dry_run_matches_erase(shop: Shop, spark: SparkSession) -> None:
    landing = (shop.root / "landing").resolve()
    (shop.root / "landing").unlink()
    shutil.copytree(landing, shop.root / "landing")
    exports = [
        export_of(shop.customers, "versions", str(shop.root / "exported" / "customers")),
        export_of(shop.cities, "current", str(shop.root / "exported" / "cities")),
    ]
    for export in exports:
        ExportRun(export, shop.warehouse, spark).run()
    # The view of this table is behind its log, which has one more record of hers.
    late = Shop(shop.root, freshness=timedelta(days=1))
    records = [{"customer": c, "name": NAME, "city": "bern", "timestamp": 50} for c in (ERIN, "bob")]
    shop.land("customers", "2.jsonl", records)
    late.run(spark, late.customers)
    _published(shop)
    there = {path: path.stat().st_mtime_ns for path in shop.root.rglob("*")}
    about: dict[str, Any] = {"exports": [export.to for export in exports], "runs": ["run-1", "run-2"]}
    said: list[str] = []
    told = late.erase(spark, late.customers, reason="", dry_run=True, tell=said.append, **about)
    assert {path: path.stat().st_mtime_ns for path in shop.root.rglob("*")} == there
    assert (told.path, told.finished) == ("", None)
    assert any(line.startswith("! cities: derived without") for line in said)
    assert ERIN not in told.model_dump_json()
    then: list[str] = []
    done = late.erase(spark, late.customers, tell=then.append, **about)
    kept = {f"! {name}: {why}" for name, why in done.kept.items()}
    assert kept
    assert kept <= {*said} & {*then}
    assert [*told.searched] == [*done.searched]
    assert told.searched["customers/view"].files is None
    assert done.searched["customers/log"].erased > told.searched["customers/view"].erased > 0
    # The dry run counts the rows that readers see; the files may have expired rows besides.
    view, stored = (one.searched.pop("customers/view") for one in (told, done))
    assert view.rows <= stored.rows
    assert view.erased <= stored.erased
    for table, one in done.searched.items():
        assert told.searched[table] == replace(one, version=None), table
    assert any(one.files for one in done.searched.values())
    for name in ("kept", "elsewhere", "unreachable"):
        assert getattr(told, name) == getattr(done, name)
    assert told.elsewhere
    # The published topic counts as no table; the certificate names the topic, and no key.
    (topic,) = [line for line in told.unreachable if line.startswith("the topic ")]
    assert topic.startswith(
        "the topic people, to which customers_to_kafka has published customers up to its offsets "
        '{0: 7}: if it is compacted, publish a tombstone of its key, {"customer": …} without a value'
    )
    (events,) = [line for line in told.unreachable if "event storage" in line]
    assert "Delete the 2 runs whose events have the key: run-1, run-2 (dagster run delete)" in events


def _published(shop: Shop) -> None:
    """The log of a sink that has published customers to a topic."""
    commit = Commit(
        asset="customers_to_kafka",
        batch=1,
        attempt="x",
        shape=Shape(kind="stream", key=["customer"]),
        inputs={"customers": {0: 7}, "topic people": {0: 7}},
        topics={"people": "id"},
    )
    about = {"userMetadata": json.dumps({delta.MARK: delta.with_format(commit.model_dump())})}
    to, properties = f"{shop.warehouse}/customers_to_kafka/log", CommitProperties(custom_metadata=about)
    write_deltalake(to, pa.table({"x": [1]}), commit_properties=properties)


class Killed(BaseException):
    pass


def test_killed_erase_continues(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shop.answers()

    def armed(function: Any, place: int, steps: Iterator[int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            done = function(*args, **kwargs)
            if next(steps) == place:
                raise Killed
            return done

        return call

    # After the commit of one log, the removal of its attempts, its purge; after the commit of another.
    for place in range(4):
        with monkeypatch.context() as patch:
            steps = iter(range(100))
            for owner, name in (
                (rewrite, "rewrite"),
                (rewrite, "purge"),
                (erasure, "remove_attempts"),
            ):
                patch.setattr(owner, name, armed(getattr(owner, name), place, steps))
            with pytest.raises(Killed):
                shop.erase(spark, shop.orders)
    done = shop.erase(spark, shop.orders)
    assert done.finished
    assert len(list((shop.root / "warehouse" / FOLDER).glob("*.json"))) == 1
    for name in ("orders", "placed"):
        gone = head_of(shop.warehouse, name)[1].erased
        assert done.searched[f"{name}/log"].erased == gone[0] > 0
    assert files_with_key(shop.root / "warehouse", "items", "customers", "owned") == []
    assert shop.answers() == before
    assert shop.findings(spark, shop.orders, shop.placed, shop.hourly) == []


def test_erase_conflicts_with_running_consumer(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = stores_of(shop.warehouse, spark)
    run = Run.pin(shop.placed, stores)
    results = run.operate(run.read())
    shop.erase(spark, shop.orders)
    with pytest.raises(ConcurrentRunError, match="a key was erased during this run"):
        run.commit(results)
    # if the run commits first, the erase is refused, and can be repeated
    shop.land("orders", "9.jsonl", [{"customer": "ada", "note": "late", "timestamp": 70}])
    find = rewrite.find

    def beside(*args: Any) -> Any:
        found = find(*args)
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "find", find)
            run_once(shop.orders, stores)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "find", beside)
        with pytest.raises(ConcurrentRunError):
            shop.erase(spark, shop.orders, key=["bob"])
    assert shop.erase(spark, shop.orders, key=["bob"]).finished


def test_erase_conflicts_with_first_run_of_consumer(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer has no log to search yet, but has written rows with the key before the erase. So the
    consumer's commit is refused."""
    for name in ("placed", "owned", "cities", "hourly"):
        shutil.rmtree(f"{shop.warehouse}/{name}")
    to, commit, find = str(shop.root / "versions"), parquet._commit, rewrite.find  # pyright: ignore
    export = ExportRun(export_of(shop.customers, "versions", to), shop.warehouse, spark)
    declared = TrainingSet("examples", shop.orders, (FeatureView(shop.customers, prefix="of_"),))
    training = TrainingRun(declared, str(shop.root / "set"), shop.warehouse, spark)

    def consume() -> None:
        run_once(shop.placed, stores_of(shop.warehouse, spark))

    runs = [consume, export.run, training.run]

    def erased(path: str, *rest: Any) -> None:
        """Starts the next run before each run commits; when all are about to commit, erases the key."""
        if runs:
            refused()
        else:
            with monkeypatch.context() as patch:
                patch.setattr(parquet, "_commit", commit)
                shop.erase(spark, shop.customers, among=[shop.placed])
        commit(path, *rest)

    def refused() -> None:
        run = runs.pop()
        with pytest.raises(ConcurrentRunError, match=r"log of customers .* got an erase of a key"):
            run()

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_commit", erased)
        refused()
    assert runs == []
    export.run()
    assert NAME not in repr(pl.read_delta(to).rows())

    # A consumer that first commits after the erase was planned is searched as well.
    def consumed(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "find", find)
            consume()
        return find(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "find", consumed)
        done = shop.erase(spark, shop.orders, among=[shop.placed])
    assert done.searched["placed/log"].erased > 0
    assert files_with_key(shop.root / "warehouse", "items") == []


def test_refused_erases(shop: Shop, spark: SparkSession) -> None:
    with pytest.raises(StorageError, match="definitions of all its consumers, got none of"):
        shop.erase(spark, shop.customers, among=[])
    with pytest.raises(StorageError, match="over the key columns"):
        shop.erase(spark, shop.customers, key=None, where="city = 'rome'")
    with pytest.raises(StorageError, match="got none; give --key"):
        shop.erase(spark, shop.customers, key=None)
    with pytest.raises(StorageError, match="expected one --key for each of the key columns"):
        shop.erase(spark, shop.customers, key=["a", "b"])
    with pytest.raises(StorageError, match="expected a reason"):
        shop.erase(spark, shop.customers, reason=" ")


def test_erase_with_changed_definition_downstream_changes_nothing(
    shop: Shop, spark: SparkSession
) -> None:
    """The declaration of a derived asset does not tell where its tables have the key."""
    changed = shop.orders.left_join(shop.customers, name="placed", select=["left.note"])
    before = [head_of(shop.warehouse, node.name) for node in shop.nodes]
    among = [changed, *(node for node in shop.nodes if node.name != "placed")]
    for dry_run in (True, False):
        with pytest.raises(NeedsReplayError, match="placed: the declaration differs from the one"):
            shop.erase(spark, shop.orders, among=among, dry_run=dry_run)
    assert [head_of(shop.warehouse, node.name) for node in shop.nodes] == before


def test_erase_by_condition_on_command_line(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop.root / "erased_shop.py").write_text(
        "from pathlib import Path\n"
        "from tests.storage.test_erase import Shop\n"
        "from vt_dagster import build_export\n"
        f"shop = Shop(Path({str(shop.root)!r}))\n"
        "globals().update({node.name: node for node in shop.nodes})\n"
        "exported = build_export(shop.items, 'versions', to=str(shop.root / 'exported'))\n"
    )
    monkeypatch.syspath_prepend(str(shop.root))
    to = str(shop.root / "exported")
    ExportRun(export_of(shop.items, "versions", to), shop.warehouse, spark).run()
    asked = ["--where", "item in ('i1', 'i2')", "--reason", "test data", "--module", "erased_shop"]
    ask = ["erase", "items", *asked, "--warehouse", shop.warehouse]
    told, done = (CliRunner().invoke(app, [*ask, *more]) for more in (["--dry-run"], []))
    assert done.exit_code == 0, done.output
    assert "would erase" in told.output
    assert told.output.splitlines()[:-1] == done.output.splitlines()[:-1]
    assert re.search(r"^items/log: [1-9]\d* of \d+ rows", done.output, re.MULTILINE)
    assert FOLDER in done.output
    for rows in (
        look_up(shop.warehouse, "owned", "current"),
        delta.require_table(to).to_pyarrow_table(),
    ):
        assert set(rows.column("item").to_pylist()) == {"i0", "i3"}
    assert shop.findings(spark, shop.items, shop.owned) == []


def test_key_in_file_statistics_is_found(shop: Shop, spark: SparkSession) -> None:
    key = Key({"customer": StringType()}, (ERIN,))
    path = f"{shop.warehouse}/customers"
    assert in_statistics(spark, f"{path}/quarantine", key, {}) > 0
    to = str(shop.root / "told")
    rows = pa.table({"id": ["a\u2028\x85", ERIN, "z" * 40], "n": [1, 2, 3]})
    write_deltalake(to, rows)
    write_deltalake(to, rows.slice(1, 1), mode="append")
    DeltaTable(to).create_checkpoint()
    for one, count in ((key, 2), (Key({"customer": StringType()}, None, "customer like 'erin%'"), 2)):
        assert in_statistics(spark, to, one, {"customer": "id"}) == count
    assert in_statistics(spark, to, Key(key.types, ("erin",)), {"customer": "id"}) == 0
    # Delta's statistics have only the beginning of a long text
    shutil.rmtree(to)
    spark.createDataFrame([("x" * 40,), ("y",)], "id string").write.format("delta").save(to)
    assert in_statistics(spark, to, Key(key.types, ("x" * 40,)), {"customer": "id"}) > 0
    both = Key({"customer": StringType(), "n": LongType()}, (ERIN, 3))
    shutil.rmtree(to)
    write_deltalake(to, pa.table({"id": [ERIN, ERIN], "n": [1, 3]}))
    assert in_statistics(spark, to, both, {"customer": "id", "n": "n"}) == 1
    assert in_statistics(spark, to, Key(both.types, (ERIN, 2)), {"customer": "id", "n": "n"}) == 0
