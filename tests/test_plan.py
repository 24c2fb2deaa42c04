"""``vt-dagster plan``: a run does what the plan's verdict says of the changed definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DecimalType,
    DoubleType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from typer.testing import CliRunner, Result

from tests.log_writer import LogWriter
from vt_dagster.cli import app
from vt_dagster.errors import (
    DefinitionsError,
    NeedsReplayError,
    SourceError,
    StorageError,
    TopologyError,
    VtDagsterError,
)
from vt_dagster.runs.plan import Planned, plan, replay_planned
from vt_dagster.runs.replay import replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.what_if import what_if_planned
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.arrow_reader import swap_folder
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.read import read
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.windows import TumblingWindow

pytestmark = pytest.mark.usefixtures("few_rows")

HOUR = timedelta(hours=1)
ALL = ["prices", "orders", "priced", "dear", "doubled", "hourly"]
PRICE = {"product": StringType(), "price": DoubleType(), "at": TimestampType()}
ORDER = {"product": StringType(), "customer": StringType(), "at": TimestampType()}
Change = Callable[[Path], Sequence[Stream]]


def columns(**kinds: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def shop(
    root: Path,
    *,
    price: str = "price",
    more: dict[str, Any] | None = None,
    of_prices: dict[str, Any] | None = None,
    of_orders: dict[str, Any] | None = None,
    grace: timedelta = HOUR,
    size: timedelta = HOUR,
    dear: str = "{} > 1",
) -> list[Stream]:
    """Prices (versioned), orders, and their downstream assets. The arguments change definitions."""
    kinds = {price if name == "price" else name: kind for name, kind in PRICE.items()}
    prices = VersionedTable(
        "prices",
        **{
            "key": "product",
            "schema": columns(**kinds, **(more or {})),
            "timestamp": "at",
            "history_retention": timedelta(days=1),
            "source": FilesSource(str(root / "prices"), optional=[*(more or {})]),
            **(of_prices or {}),
        },
    )
    orders = Stream(
        "orders",
        **{
            "key": "product",
            "schema": columns(**ORDER),
            "timestamp": "at",
            "source": FilesSource(str(root / "orders")),
            **(of_orders or {}),
        },
    )
    made = prices.filter(dear.format(price), name="dear")
    return [
        prices,
        orders,
        orders.left_join(
            prices, name="priced", select=["left.*", f"right.{price} as price"], grace_period=grace
        ),
        made,
        made.map_values("*", f"{price} * 2 as twice", name="doubled"),
        orders.group_by("customer")
        .windowed_by(TumblingWindow(size, grace=grace))
        .aggregate({"orders": "count(*)"}, name="hourly"),
    ]


def land(root: Path, name: str, file: str, *rows: dict[str, Any]) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({**row, "at": f"2024-01-01T{row['at']}:00Z"}) + "\n" for row in rows)
    (root / name / file).write_text(text)


@pytest.fixture(scope="module")
def live(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source files, and with the warehouse after one run of each asset."""
    root = tmp_path_factory.mktemp("plan")
    land(root, "prices", "1.jsonl", *({"product": p, "price": 2.0, "at": "10:00"} for p in "ab"))
    land(root, "orders", "1.jsonl", {"product": "a", "customer": "x", "at": "10:30"})
    with small_run(spark):
        for node in shop(root):
            assert run_once(node, stores_of(str(root / "warehouse"), spark)).commit is not None
    return root


@pytest.fixture
def copy(live: Path, tmp_path: Path) -> Path:
    """A copy of ``live`` with new records for the next run of each asset. Tests may change it."""
    root = tmp_path / "copy"
    shutil.copytree(live, root)
    land(root, "prices", "2.jsonl", {"product": "a", "price": 3.0, "at": "12:00"})
    land(root, "orders", "2.jsonl", {"product": "a", "customer": "x", "at": "14:00"})
    return root


def with_moved_source(root: Path) -> Sequence[Stream]:
    land(root, "moved", "1.jsonl", {"product": "a", "price": 2.5, "at": "10:00"})
    return shop(root, of_prices={"source": FilesSource(str(root / "moved"))})[:1]


def node_with_inputs(nodes: Sequence[Stream], name: str) -> Sequence[Stream]:
    """The node of this name and its inputs, so that a test needs fewer runs."""
    (node,) = (one for one in nodes if one.name == name)
    return [*node.inputs, node]


def with_added_filter(root: Path) -> Sequence[Stream]:
    nodes = shop(root)
    return [*nodes, nodes[0].filter("price <= 1", name="cheap")]


def with_name_in_other_case(root: Path) -> Sequence[Stream]:
    nodes = shop(root)
    return [*nodes, nodes[0].filter("price <= 1", name="Dear")]


@dataclass(frozen=True)
class Case:
    """A change of the definitions. ``says`` has the verdict and a part of the text for each asset that
    is not unchanged; ``causes`` has the input that causes a refusal; ``runs`` has the assets to run,
    if these are not the ones in ``says``."""

    change: Change
    says: dict[str, tuple[str, str]]
    causes: dict[str, str]
    runs: tuple[str, ...] = ()


CASES = {
    "nothing": Case(shop, {}, {}, ("priced",)),
    "grace period": Case(
        lambda root: shop(root, grace=2 * HOUR),
        {
            "priced": ("goes_on", "grace_period was 1 hour, is 2 hours"),
            "hourly": ("goes_on", "window.grace was 1 hour, is 2 hours"),
        },
        {},
    ),
    "history retention": Case(
        lambda root: node_with_inputs(
            shop(root, of_prices={"history_retention": timedelta(days=2)}), "dear"
        ),
        dict.fromkeys(
            ("prices", "dear"),
            ("goes_on", "history_retention was 1 day, is 2 days; the next run rebuilds the view"),
        ),
        {},
    ),
    "window": Case(
        lambda root: shop(root, size=2 * HOUR),
        {"hourly": ("needs_replay", "window was tumbling windows of 1 hour, is tumbling")},
        {},
    ),
    "filter expression": Case(
        lambda root: shop(root, dear="{} > 5"),
        {
            "dear": ("needs_replay", "predicate was 'price > 1', is 'price > 5'"),
            "doubled": ("refused", "dear: the declaration differs"),
        },
        {"doubled": "dear"},
    ),
    "new column": Case(
        lambda root: node_with_inputs(shop(root, more={"note": StringType()}), "dear"),
        dict.fromkeys(("prices", "dear"), ("goes_on", "columns change: new, null in old rows: note")),
        {},
    ),
    "another type": Case(
        lambda root: shop(root, of_prices={"schema": columns(**{**PRICE, "price": IntegerType()})}),
        dict.fromkeys(
            ("prices", "priced", "dear", "doubled"), ("needs_replay", "price: double -> int")
        ),
        {},
    ),
    "renamed column": Case(
        lambda root: node_with_inputs(
            shop(root, price="cost", of_prices={"renamed": {"price": "cost"}}), "dear"
        ),
        dict.fromkeys(("prices", "dear"), ("goes_on", "renamed: price -> cost")),
        {},
    ),
    "renamed column, not declared": Case(
        lambda root: shop(root, price="cost")[:2],
        {"prices": ("needs_replay", "declare renamed={'price': 'cost'}")},
        {},
    ),
    "source elsewhere": Case(with_moved_source, {}, {}, ("prices",)),  # its files are new records
    "source is missing": Case(
        lambda root: shop(root, of_prices={"source": FilesSource(str(root / "nowhere"))})[:1],
        {"prices": ("refused", "expected a directory")},
        {},
    ),
    "key": Case(
        lambda root: shop(root, of_orders={"key": "customer"}),
        {
            "orders": ("refused", "declared as stream keyed by ['customer']"),
            "priced": ("refused", "declared as stream keyed by ['customer']"),
            "hourly": ("refused", "orders: declared as stream"),
        },
        {"hourly": "orders"},
    ),
    "key, and a window over its records": Case(
        lambda root: shop(root, of_orders={"key": "customer"}, size=2 * HOUR),
        {
            "orders": ("refused", "declared as stream keyed by ['customer']"),
            "priced": ("refused", "declared as stream keyed by ['customer']"),
            "hourly": ("needs_replay", "window was tumbling windows of 1 hour, is tumbling"),
        },
        {"hourly": "orders"},
    ),
    "kind": Case(
        lambda root: [
            Table(
                "orders",
                key="product",
                schema=columns(**ORDER),
                timestamp="at",
                source=FilesSource(str(root / "orders")),
            )
        ],
        {"orders": ("refused", "declared as table keyed by")},
        {},
    ),
    "new asset": Case(with_added_filter, {"cheap": ("new", "")}, {}),
    "new asset, a name that differs in case": Case(
        with_name_in_other_case, {"Dear": ("refused", "the warehouse has an asset 'dear'")}, {}
    ),
    "removed asset": Case(lambda root: shop(root)[:-1], {"hourly": ("removed", "")}, {}),
}


def test_publication_is_no_removed_asset(tmp_path: Path) -> None:
    """The position of a publication is a log in the warehouse, without rows of an asset."""
    logs = {"prices": "log of prices", "topic sold": "an id"}
    LogWriter(tmp_path, "prices_to_kafka", kind="stream", logs=logs).run([("a", "1", 0)], 1)
    LogWriter(tmp_path, "old").run([("a", "1", 0)], 1)
    new = shop(tmp_path / "landing")[:1]
    found = {one.asset: one.verdict for one in plan(str(tmp_path), new)}
    assert {*found} == {new[0].name, "old"}
    assert found["old"] == "removed"


def text(one: Planned) -> str:
    return one.reason or "; ".join(one.changes)


def affected_nodes(nodes: Sequence[Stream], changed: set[str]) -> list[Stream]:
    """The changed nodes, the nodes downstream of them, and all nodes upstream of these, in order."""

    def made_of(node: Stream) -> set[str]:
        return {node.name}.union(*map(made_of, node.inputs))

    below = [made_of(node) for node in nodes if made_of(node) & changed]
    return [node for node in nodes if any(node.name in names for names in below)]


@pytest.mark.parametrize("name", CASES)
def test_run_follows_plan_verdict(spark: SparkSession, copy: Path, name: str) -> None:
    case, warehouse = CASES[name], str(copy / "warehouse")
    nodes = case.change(copy)
    there = {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")}
    found = {one.asset: one for one in plan(warehouse, nodes)}
    assert {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")} == there

    declared = {node.name for node in nodes}
    gone = {n: ("removed", "") for n in ALL if n not in declared}
    said = {n: one for n, one in found.items() if one.verdict != "unchanged"}
    expected = {**gone, **case.says}
    assert {n: one.verdict for n, one in said.items()} == {n: v for n, (v, _) in expected.items()}
    assert [n for n, (_, part) in expected.items() if part not in text(said[n])] == [], said
    assert {n: one.cause for n, one in found.items() if one.cause} == case.causes

    for node in affected_nodes(nodes, {*case.runs} or {*said} or {*found}):
        # the run does what the plan says of the asset
        one = found[node.name]
        run: Any = lambda node=node: run_once(node, stores_of(warehouse, spark))  # noqa: E731
        if not one.stops:
            assert run().commit is not None
            continue
        with pytest.raises(VtDagsterError) as raised:
            run()
        assert str(raised.value) == one.reason
        if one.cause is None:
            assert isinstance(raised.value, NeedsReplayError) == (one.verdict == "needs_replay")
    # An asset that ran is as declared now. A refused asset is still refused.
    after = {one.asset: one for one in plan(warehouse, nodes)}
    went_on = {n for n, one in found.items() if one.verdict in ("unchanged", "goes_on", "new")}
    assert {n for n, one in after.items() if one.verdict == "unchanged"} == went_on
    assert {n: one for n, one in after.items() if one.stops} == {
        n: replace(one, rows=after[n].rows, bytes=after[n].bytes)
        for n, one in found.items()
        if one.stops
    }


def test_plan_names_downstream_replays(spark: SparkSession, copy: Path) -> None:
    """The plan names the downstream assets. Its numbers of rows and bytes are those of the log."""
    warehouse, nodes = str(copy / "warehouse"), shop(copy, dear="{} > 5")
    (dear,) = [one for one in plan(warehouse, nodes, ["dear"]) if one.asset == "dear"]
    assert dear.downstream == ("doubled",)
    log = DeltaTable(f"{warehouse}/dear/log")
    assert dear.rows == log.to_pyarrow_table().num_rows == 2
    assert dear.bytes == sum(Path(f).stat().st_size for f in log.file_uris())

    replay(warehouse, nodes[3], "dear_new", spark)
    # The tables of a replay are not reported as a removed asset.
    assert {one.asset for one in plan(warehouse, nodes)} == {*ALL}
    swap(warehouse, "dear", "dear_new")
    found = {one.asset: one for one in plan(warehouse, nodes) if one.verdict != "unchanged"}
    assert {n: one.verdict for n, one in found.items()} == {
        "doubled": "needs_replay",
        "dear_new": "removed",
    }
    with pytest.raises(NeedsReplayError) as raised:
        run_once(nodes[4], stores_of(warehouse, spark))
    assert str(raised.value) == found["doubled"].reason
    assert "got another log" in found["doubled"].reason


class Killed(BaseException):
    pass


def killed_at(start: str) -> Callable[[str], None]:
    def tell(line: str) -> None:
        if line.startswith(start):
            raise Killed

    return tell


def rows_of(root: Path, name: str) -> list[tuple[Any, ...]]:
    found = read(name, warehouse=str(root / "warehouse")).select(["product", "price"]).to_pylist()
    return sorted(tuple(row.values()) for row in found)


def test_planned_replays_resume_after_kill(
    spark: SparkSession, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assets that the plan names are compared, replayed together with their downstream assets, and
    swapped. A call that was killed at a step continues there when it is repeated."""
    warehouse, nodes = str(copy / "warehouse"), shop(copy, dear="{} > 1 and product = 'a'")
    before = {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")}
    changes = what_if_planned(warehouse, nodes, spark)
    assert [(one.asset, one.remade, one.removed, one.changed) for one in changes] == [
        ("dear", ("dear",), 0, 1),  # the row of b is deleted now
        ("doubled", ("dear", "doubled"), 0, 1),
    ]
    chosen: list[Planned] = []

    def refuse(found: list[Planned]) -> None:
        chosen.extend(found)
        raise Killed

    with pytest.raises(Killed):
        replay_planned(warehouse, nodes, spark, confirm=refuse)
    assert [(one.asset, one.verdict) for one in chosen] == [
        ("dear", "needs_replay"),
        ("doubled", "refused"),
    ]
    assert {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")} == before

    with pytest.raises(Killed):
        replay_planned(warehouse, nodes, spark, tell=killed_at("dear_new: committed"))
    other = shop(copy, dear="{} > 1 and product = 'b'")
    with pytest.raises(StorageError, match="no tables dear_new, or those of a replay of the same"):
        replay_planned(warehouse, other, spark)
    into = {"dear": "dear_new", "doubled": "doubled_new"}
    assert replay_planned(warehouse, nodes, spark, swapping=False) == into
    logs = {name: AssetStore(warehouse, node).head() for name, node in zip(ALL, nodes, strict=True)}
    assert rows_of(copy, "doubled") == [("a", 2.0), ("b", 2.0)]
    assert rows_of(copy, "doubled_new") == [("a", 2.0)]
    with pytest.raises(Killed):
        replay_planned(warehouse, nodes, spark, tell=killed_at("dear: swapped"))
    assert rows_of(copy, "dear") == [("a", 2.0)]
    (copy / "warehouse" / "doubled").rename(copy / "warehouse" / swap_folder("doubled", "doubled_new"))
    lines: list[str] = []
    assert replay_planned(warehouse, nodes, spark, tell=lines.append) == {}
    assert lines == ["doubled: swapped; doubled_new has the earlier tables"]
    assert rows_of(copy, "doubled") == [("a", 2.0)]
    verdicts = {one.asset: one.verdict for one in plan(warehouse, nodes)}
    assert verdicts == {
        **dict.fromkeys(ALL, "unchanged"),
        "dear_new": "removed",
        "doubled_new": "removed",
    }
    for name in ("prices", "priced"):  # the input of dear, and another asset of that input
        assert AssetStore(warehouse, nodes[ALL.index(name)]).head() == logs[name]
    for node in nodes:  # each asset can run after the swap
        assert run_once(node, stores_of(warehouse, spark)).commit is not None
    assert rows_of(copy, "doubled") == [("a", 3.0)]
    with pytest.raises(StorageError, match="which may be the tables from before an earlier replay"):
        replay_planned(warehouse, other, spark)


def test_lossy_replays_are_refused(spark: SparkSession, copy: Path) -> None:
    """Replays are refused before the first one starts if they would lose matches that have expired
    from the table's history, or records of removed files."""
    warehouse = str(copy / "warehouse")
    prices, orders, *_ = shop(copy, of_prices={"history_retention": HOUR})
    run_once(prices, stores_of(warehouse, spark))
    priced = orders.left_join(prices, name="priced", select=["left.*", "right.price * 2 as price"])
    before = {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")}
    for call in (
        lambda: replay_planned(warehouse, [priced], spark),
        lambda: replay(warehouse, priced, "priced_new", spark),
    ):
        with pytest.raises(StorageError, match=r"priced.*: expected that the history of prices covers"):
            call()
    # an asset gets a step between it and its source, or loses its step; the new input has no tables yet
    step = replace(orders, name="raw").select_key("product", name="orders")
    alone = replace(prices, name="dear")
    found = {one.asset: one for node in (step, alone) for one in plan(warehouse, [node], [node.name])}
    assert {one.verdict for one in found.values()} == {"needs_replay"}
    assert "it had a source of its own, is the result of select_key now" in found["orders"].reason
    assert "it was the result of filter, has a source of its own now" in found["dear"].reason
    with pytest.raises(StorageError, match=r"commits of its new input raw.* \(vt-dagster run raw\)"):
        replay_planned(warehouse, [step], spark)
    other = shop(copy, of_prices={"schema": columns(**{**PRICE, "price": DecimalType(4, 2)})})[:1]
    (copy / "prices" / "1.jsonl").rename(copy / "aside.jsonl")
    with pytest.raises(SourceError, match=r"that are no longer in .*1\.jsonl: .* --into prices_new"):
        replay_planned(warehouse, other, spark)
    assert {path: path.stat().st_mtime_ns for path in Path(warehouse).rglob("*")} == before
    # the single replay that the message advises
    told: list[str] = []
    replay(warehouse, other[0], "prices_new", spark, tell=told.append)
    assert told[0].startswith("! prices: expected all files that its log was made of, got ")
    swap(warehouse, "prices", "prices_new")
    assert replay_planned(warehouse, other, spark) == {}


def test_refusal_that_replay_cannot_fix(spark: SparkSession, copy: Path) -> None:
    """A refusal that a replay cannot remove stops planned replays and a restatement at their start."""
    warehouse, nodes = str(copy / "warehouse"), shop(copy, dear="{} > 5")
    about: Any = {"start": "2024-01-01T00:00:00Z", "spark": spark, "dry_run": True}
    assert restate(warehouse, nodes[3], among=nodes, **about) == ["dear", "doubled"]
    other = [*nodes[:4], nodes[3].to_stream(name="doubled")]
    for call, said in (
        (
            lambda: replay_planned(warehouse, other, spark),
            "that it needs only a replay, but its runs",
        ),
        (
            lambda: what_if_planned(warehouse, other, spark),
            "that it needs only a replay, but its runs",
        ),
        (lambda: restate(warehouse, nodes[3], among=other, **about), "that its next run is accepted"),
    ):
        with pytest.raises(StorageError, match=f"doubled: expected {said}.* declared as stream keyed"):
            call()
    assert not (copy / "warehouse" / "dear_new").exists()


def test_plan_refuses_foreign_writes(spark: SparkSession, copy: Path) -> None:
    log = DeltaTable(f"{copy}/warehouse/orders/log")
    log.delete("customer = 'x'")
    (found,) = plan(str(copy / "warehouse"), shop(copy), ["orders"])
    assert (found.verdict, "another program has changed the log" in found.reason) == ("refused", True)
    with pytest.raises(VtDagsterError) as raised:
        run_once(shop(copy)[1], stores_of(str(copy / "warehouse"), spark))
    assert str(raised.value) == found.reason


def test_plan_before_first_run(tmp_path: Path) -> None:
    land(tmp_path, "prices", "1.jsonl")
    land(tmp_path, "orders", "1.jsonl")
    found = plan(str(tmp_path / "nothing yet"), shop(tmp_path)[-1:])
    assert found == [Planned("orders", "new"), Planned("hourly", "new")]
    with pytest.raises(TopologyError, match=r"expected assets of .*'hourly'.*, got \['other'\]"):
        plan(str(tmp_path / "nothing yet"), shop(tmp_path), ["other"])


def run_plan_command(module: str, warehouse: Path, *options: str) -> Result:
    arguments = ["plan", "--module", module, "--warehouse", str(warehouse), *options]
    return CliRunner().invoke(app, arguments)


def test_plan_command(
    spark: SparkSession, live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, change in {
        "as_it_is": "",
        "longer": "grace=2 * HOUR",
        "other": "dear='{} > 5', grace=2 * HOUR",
        "stuck": "of_orders={'key': 'customer'}, size=2 * HOUR",
    }.items():
        code = (
            f"from pathlib import Path\nfrom tests.test_plan import HOUR, shop\n*_, {', '.join(ALL)} = "
        )
        (tmp_path / f"plan_{name}.py").write_text(f"{code}shop(Path({str(live)!r}), {change})\n")
    (tmp_path / "plan_nothing.py").write_text("")
    warehouse = live / "warehouse"

    same = run_plan_command("plan_as_it_is", warehouse)
    assert (same.exit_code, same.output) == (0, "6 unchanged\n")
    longer = run_plan_command("plan_longer", warehouse)
    assert longer.exit_code == 0
    assert longer.output.splitlines() == [
        "priced: goes on",
        "    grace_period was 1 hour, is 2 hours",
        "hourly: goes on",
        "    window.grace was 1 hour, is 2 hours",
        "4 unchanged, 2 goes on",
    ]
    other = run_plan_command("plan_other", warehouse, "--asset", "dear", "--asset", "doubled")
    assert other.exit_code == 3
    lines = other.output.splitlines()
    about = AssetStore(str(warehouse), shop(live)[3])
    size = sum(f.stat().st_size for f in Path(about.log_path).glob("1-*/*.parquet"))
    assert lines[:3] == [
        "dear: needs a replay",
        f"    its log has 2 rows, {size:,} bytes",
        "    1 asset downstream to replay after it: doubled",
    ]
    command = "vt-dagster replay dear --into dear_new --module plan_other --warehouse "
    assert f"    {command}{warehouse}" in lines
    assert "    it reads dear, whose tables are refused:" in lines
    assert lines[-1] == "1 needs a replay, 1 refused"
    assert [line for line in lines if len(line) > 80 and str(warehouse) not in line] == []

    assert lines[-2].startswith(
        "to replay and swap them all: vt-dagster replay --planned --module plan_"
    )

    stuck = run_plan_command("plan_stuck", warehouse)
    alone = run_plan_command("plan_stuck", warehouse, "--asset", "hourly")
    for said in (stuck.output, alone.output):
        assert "    it reads orders, whose tables are refused: correct that first" in said
        assert "vt-dagster replay" not in said.replace("(vt-dagster replay)", "")
    about = ["--planned", "--module", "plan_stuck", "--warehouse", str(warehouse)]
    refused = CliRunner().invoke(app, ["replay", *about, "--yes"])
    assert isinstance(refused.exception, StorageError)
    assert str(refused.exception).startswith("orders: expected that it needs only a replay")

    told = run_plan_command("plan_other", warehouse, "--json")
    assert told.exit_code == 3
    document = json.loads(told.output)
    assert document["stops"] is True
    by_name = {one["asset"]: one for one in document["assets"]}
    assert list(by_name) == ALL
    assert by_name["dear"]["verdict"] == "needs_replay"
    assert by_name["dear"]["downstream"] == ["doubled"]
    assert by_name["doubled"]["cause"] == "dear"
    assert by_name["priced"]["changes"] == ["grace_period was 1 hour, is 2 hours"]
    assert isinstance(run_plan_command("plan_nothing", warehouse).exception, TopologyError)

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("vt_dagster.cli.tables.sys", terminal)
    about = ["--module", "plan_other", "--warehouse", str(warehouse)]
    refused = CliRunner().invoke(app, ["replay", "--planned", *about], input="n\n")
    assert refused.exit_code == 1
    rows = [line.split() for line in refused.output.splitlines()]
    assert ["dear", "2", f"{size:,}", "it", "needs", "a", "replay"] in rows
    assert [[*row[:1], *row[3:]] for row in rows if "of" in row] == [
        ["doubled", "downstream", "of", "dear"]
    ]
    assert "Replay and swap them, while nothing else runs? [y/N]: n" in refused.output
    assert not (warehouse / "dear_new").exists()
    for words in (
        ["replay", "dear", "--planned"],
        ["replay", "dear"],
        ["replay", "dear", "--into", "x", "--no-swap"],
        ["replay", "dear", "--into", "x", "--from", "2024-01-01", "--from-offsets", "{}"],
        ["what-if", "dear", "--planned"],
        ["what-if", "--planned", "--set", "grace_period=2h"],
        ["what-if"],
    ):
        wrong = CliRunner().invoke(app, [*words, *about])
        assert isinstance(wrong.exception, DefinitionsError), (words, wrong.output)
