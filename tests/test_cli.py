"""The command line: keys and times that are no plain texts, damaged views, files it cannot write."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from rich.console import Console
from typer.testing import CliRunner, Result

import vt_dagster
from tests.log_writer import LogWriter
from tests.market import Market, messages, run
from vt_dagster import FilesSource, VersionedTable, build_asset
from vt_dagster.cli import COMMANDS, app
from vt_dagster.cli import explain as of_explain
from vt_dagster.cli import run as of_run
from vt_dagster.cli import setup as of_setup
from vt_dagster.cli import tables as of_tables
from vt_dagster.cli.lookup import json_text
from vt_dagster.conformance import runner as of_conformance
from vt_dagster.errors import StorageError
from vt_dagster.runs.plan import plan
from vt_dagster.storage import commit_log
from vt_dagster.storage.read import read
from vt_dagster.topology.durations import in_utc

FAR, PAST = "9999-12-31T00:00:00Z", "0001-01-01T00:00:00Z"
COLUMNS = (
    "day date, at timestamp, far timestamp, past timestamp, tags array<string>, place struct<x: int>"
)
ROW = {"day": "9998-01-02", "at": "2024-01-01T00:00:00Z", "far": FAR, "past": PAST}
AGO = timedelta(days=1)


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tables with the same row and different keys."""
    root = tmp_path_factory.mktemp("cli")
    (root / "landing").mkdir()
    line = json.dumps({**ROW, "tags": ["a"], "place": {"x": 1}})
    (root / "landing" / "1.jsonl").write_text(f"{line}\n", encoding="utf-8")
    source = FilesSource(str(root / "landing"))
    about: dict[str, Any] = {"schema": StructType.fromDDL(COLUMNS), "source": source}
    days = VersionedTable("days", key=("day", "far"), timestamp="at", history_retention=AGO, **about)
    tables = [
        days,
        replace(days, name="tagged", key=("tags",)),
        replace(days, name="placed", key=("place",)),
    ]
    result = run([build_asset(table) for table in tables], root / "warehouse")
    assert result.success, messages(result)
    return root / "warehouse"


def test_run_names_assets_of_the_users_own(tmp_path: Path) -> None:
    declared = tmp_path / "mine.py"
    declared.write_text(
        "import dagster as dg\n"
        "@dg.asset\ndef report() -> None: ...\n"
        "@dg.asset\ndef sent() -> dg.MaterializeResult:\n"
        "    return dg.MaterializeResult(metadata={'records_published': 1200})\n"
        "defs = dg.Definitions(assets=[report, sent])\n"
    )
    said = CliRunner().invoke(app, ["run", "--file", str(declared)])
    assert said.exit_code == 0, said.output
    assert {"report: materialized", "sent: 1,200 records published"} <= {*said.output.splitlines()}


def test_run_shows_the_key_of_a_deleted_row(tmp_path: Path) -> None:
    LogWriter(tmp_path / "warehouse").run([("apple", "1", 0), ("apple", None, 1)], 1)
    declared = tmp_path / "mine.py"
    declared.write_text(
        "import dagster as dg\n"
        "key = dg.TableColumn('k', constraints=dg.TableColumnConstraints(other=['key']))\n"
        "schema = dg.TableSchema(columns=[key, dg.TableColumn('v')])\n"
        "@dg.asset\ndef prices() -> dg.MaterializeResult:\n"
        "    return dg.MaterializeResult(metadata={'log_rows': 2, 'dagster/column_schema': schema,\n"
        f"        'dagster/uri': {str(tmp_path / 'warehouse' / 'prices' / 'view')!r}}})\n"
        "defs = dg.Definitions(assets=[prices])\n"
    )
    said = CliRunner().invoke(app, ["run", "--file", str(declared)])
    assert said.exit_code == 0, (said.output, said.exception)
    rows = [line.split() for line in said.output.splitlines()]
    assert ["apple", "1"] in rows
    assert ["apple", "(deleted)"] in rows


def test_narrow_terminal_cuts_no_name_or_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"order_identifier": 1, "order_value_date": "2024-01-01 10:00:00", "[note]": "Z" * 80}
    result = of_run.CheckResult("orders", "sound", "failed", sample=[row])
    of_run._print([result], Console(width=50))
    LogWriter(tmp_path).run([("apple", "Y" * 200, 0)], 1)
    columns = [dg.TableColumn(name) for name in ("k", "v")]
    about: Any = {"log_rows": 1, "dagster/column_schema": dg.TableSchema(columns)}
    about["dagster/uri"] = f"{tmp_path}/prices/view"
    of_run._show(dg.AssetMaterialization("prices", metadata=about), 1)
    at: Any = {"VT_DAGSTER_WAREHOUSE": str(tmp_path), "COLUMNS": "100"}
    told = CliRunner().invoke(app, ["history", "prices", "--key", "apple"], env=at)
    said = capsys.readouterr().out + told.output
    assert "…" not in said
    assert (said.count("Z"), said.count("Y")) == (80, 400)


def run_command(warehouse: Path, command: str, table: str, *keys: str) -> Result:
    options = [part for key in keys for part in ("--key", key)]
    about = {"VT_DAGSTER_WAREHOUSE": str(warehouse), "COLUMNS": "300"}
    return CliRunner().invoke(app, [command, table, *options], env=about)


@pytest.mark.parametrize(
    "command",
    [
        ["history", "days", "--key", "k", "--limit", "0"],
        ["history", "days", "--key", "k", "--limit", "-1"],
        ["explain", "days", "--key", "k", "--most", "0"],
        ["run", "--rows", "-1"],
    ],
)
def test_number_below_range_is_refused(command: list[str]) -> None:
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"Invalid value for '{command[-2]}': Input should be greater than or" in done.output


@pytest.mark.parametrize("command", ["get", "history"])
def test_first_and_last_year_are_shown(warehouse: Path, command: str) -> None:
    key = ("9998-01-02", FAR)
    found = run_command(warehouse, command, "days", *key)
    assert found.exit_code == 0, found.exception
    for said in ("9998-01-02", "9999-12-31 00:00:00", "0001-01-01 00:00:00"):
        assert said in found.output
    nobody = run_command(warehouse, command, "days", "9998-01-03", FAR)
    assert nobody.exit_code == 1
    assert isinstance(nobody.exception, SystemExit)


@pytest.mark.parametrize("command", ["get", "history"])
@pytest.mark.parametrize(
    ("table", "key", "said"),
    [
        ("tagged", '["a"]', "the key column tags has type array<string>"),
        ("placed", '{"x": 1}', "the key column place has type struct<x:int>"),
    ],
)
def test_nested_key_column_is_refused(
    warehouse: Path, command: str, table: str, key: str, said: str
) -> None:
    refused = run_command(warehouse, command, table, key)
    assert isinstance(refused.exception, StorageError)
    assert said in str(refused.exception)
    assert f"{warehouse}/{table}/view" in str(refused.exception)


@pytest.mark.parametrize("key", ["soon", "2024-13-01", "07/01/2024", ""])
def test_invalid_date_key_is_refused(warehouse: Path, key: str) -> None:
    refused = run_command(warehouse, "get", "days", key, FAR)
    assert isinstance(refused.exception, StorageError)
    assert f"as a date for day, got {key!r}" in str(refused.exception)


@pytest.mark.parametrize("damage", ["a file is gone", "a file is cut off", "its log is cut off"])
def test_damaged_view_is_rebuilt(warehouse: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "warehouse"
    shutil.copytree(warehouse, copy)
    before = run_command(copy, "history", "days", "9998-01-02", FAR)
    view = copy / "days" / "view"
    file = next(view.glob("*/**/*.parquet"))
    if damage == "a file is gone":
        file.unlink()
    elif damage == "a file is cut off":
        file.write_bytes(file.read_bytes()[:50])
    else:
        commit = next((view / "_delta_log").glob("*.json"))
        commit.write_bytes(commit.read_bytes()[:50])
    failed = run_command(copy, "history", "days", "9998-01-02", FAR)
    assert isinstance(failed.exception, StorageError)
    assert damage == "its log is cut off" or "vt-dagster rebuild days" in str(failed.exception)
    done = run_command(copy, "rebuild", "days")
    assert done.exit_code == 0, done.exception
    assert "days: view at version" in done.output
    assert run_command(copy, "history", "days", "9998-01-02", FAR).output == before.output


@pytest.mark.parametrize(("command", "said"), [("get", "value for"), ("history", "version of")])
def test_missing_row_suggests_explain_command(tmp_path: Path, command: str, said: str) -> None:
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    missing = run_command(tmp_path, command, "prices", "a pear")
    assert missing.exit_code == 1
    way_out = "vt-dagster explain prices --key 'a pear'"
    assert missing.output == f"prices has no {said} a pear; {way_out} shows why\n"
    explained = run_command(tmp_path, "explain", "prices", "a pear")
    assert isinstance(explained.exception, SystemExit)
    assert "a pear" in explained.output


def test_missing_asset_lists_known_assets(tmp_path: Path) -> None:
    none = run_command(tmp_path, "get", "price", "apple")
    assert "committed there; run it first (vt-dagster run price)" in str(none.exception)
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    missing = run_command(tmp_path, "get", "price", "apple")
    assert isinstance(missing.exception, StorageError)
    assert "expected one of ['prices']" in str(missing.exception)
    assert "or another warehouse with --warehouse" in str(missing.exception)


@pytest.mark.parametrize("name", ["", "price", "../prices"])
@pytest.mark.parametrize(
    "command",
    [
        ["get", "--key", "a"],
        ["compare", "prices"],
        ["swap", "prices"],
        ["rebuild"],
        ["erase", "--key", "a"],
    ],
    ids=lambda command: command[0],
)
def test_unknown_name_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(of_tables, "build_session", started)
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    refused = CliRunner().invoke(app, [*command, name], env={"VT_DAGSTER_WAREHOUSE": str(tmp_path)})
    assert isinstance(refused.exception, StorageError), refused.exception
    assert "one of ['prices']" in str(refused.exception)


def test_swap_of_unrelated_assets_is_refused_without_yes(tmp_path: Path) -> None:
    """A swap takes a replay, also one that has run on or was swapped before, or a table of the same
    definition."""
    for name, about in {
        "prices": {},
        "alike": {},
        "plain": {"kind": "table"},
        "rates_new": {"kind": "table", "run_id": "replay:rates"},
        "prices_new": {"retention": timedelta(days=9), "run_id": "replay:prices"},
    }.items():
        log = LogWriter(tmp_path, name, **about)
        log.run([("apple", name, 0)], 1)
        log.run_id = "on"
        log.run([("pear", name, 2)], 3)

    def swapped(one: str, other: str, *more: str) -> None:
        done = CliRunner().invoke(app, ["swap", one, other, *more, "--warehouse", str(tmp_path)])
        if done.exception is not None:
            raise done.exception

    def owner(name: str) -> Any:
        return read(name, warehouse=str(tmp_path))["v"][0].as_py()

    for one, other in (("prices", "plain"), ("plain", "prices"), ("prices", "rates_new")):
        with pytest.raises(StorageError, match=f"{other} to be a replay of {one}"):
            swapped(one, other)
    for other in ("prices_new", "alike"):
        swapped("prices", other)
        assert (owner("prices"), owner(other)) == (other, "prices")
        swapped("prices", other)
        assert (owner("prices"), owner(other)) == ("prices", other)
    swapped("prices", "prices_new")
    for one, other in (("plain", "alike"), ("prices", "plain")):
        with pytest.raises(StorageError, match=f"{other} to be a replay of {one}"):
            swapped(one, other)
    swapped("plain", "alike", "--yes")
    assert (owner("plain"), owner("alike")) == ("alike", "plain")


def test_first_run_that_died_leaves_no_asset(tmp_path: Path) -> None:
    """Such a run has made the folder of the log, but no commit."""
    (tmp_path / "rates" / "log" / "_delta_log").mkdir(parents=True)
    none = run_command(tmp_path, "get", "rates", "apple")
    assert "nothing was ever committed there; run it first" in str(none.exception)
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    missing = run_command(tmp_path, "get", "rates", "apple")
    assert "expected one of ['prices']" in str(missing.exception)
    assert [one.asset for one in plan(str(tmp_path), [])] == ["prices"]


def test_get_and_history_of_a_stream(tmp_path: Path) -> None:
    LogWriter(tmp_path, "lines", kind="stream").run([("apple", str(at), at) for at in (0, 5, 3)], 9)
    assert re.search(r"^v +3$", run_command(tmp_path, "get", "lines", "apple").output, re.M)
    told = run_command(tmp_path, "explain", "lines", "apple").output
    assert "v=3" in told
    refused = str(run_command(tmp_path, "history", "lines", "apple").exception)
    assert refused.endswith(
        "got 'versions'; read the log, with all records of a key (vt-dagster get and explain show "
        "the last)"
    )
    LogWriter(tmp_path, "plain", kind="table").run([("apple", "1", 0)], 1)
    refused = str(run_command(tmp_path, "history", "plain", "apple").exception)
    assert refused.endswith("got 'versions'; declare a VersionedTable to keep versions")


@pytest.mark.parametrize("command", ["get", "history"])
def test_rows_as_json(tmp_path: Path, command: str) -> None:
    LogWriter(tmp_path).run([("apple", "1", 0), ("pear", "2", 0)], 1)
    about = {"VT_DAGSTER_WAREHOUSE": str(tmp_path)}
    done = CliRunner().invoke(app, [command, "prices", "--key", "pear", "--json"], env=about)
    (row,) = map(json.loads, done.output.splitlines())
    assert (row["k"], row["v"]) == ("pear", "2")


def test_numbers_that_json_lacks_are_texts() -> None:
    row = {"a": math.nan, "b": [-math.inf, 1.5], "c": {"d": Decimal("1.50")}, "e": 2**63}
    told = json_text(row)
    assert told == '{"a": "NaN", "b": ["-Infinity", 1.5], "c": {"d": "1.50"}, "e": 9223372036854775808}'


def test_help_lists_every_command() -> None:
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    for name in COMMANDS:
        assert re.search(rf"^│ {name} ", told, re.MULTILINE), name
    for words in ([], ["demo"], ["spark"], ["spark", "start"], ["get"]):
        said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
        assert said.exit_code == 0
        assert "bool" not in said.output


SCENARIO = Path(__file__).parent / "conformance" / "worked" / "kip328-final-results.json"
WRITES = [
    (["lateness", "prices", "--picture"], "x.svg"),
    (["check", "--junit"], "x.xml"),
    (["conformance", str(SCENARIO), "--json"], "x.json"),
]


@pytest.mark.parametrize(
    ("arguments", "file"),
    [*WRITES, (["spark", "jars", "--to"], "x")],
    ids=["lateness", "check", "conformance", "jars"],
)
@pytest.mark.parametrize("unfit", ["below a file", "itself"])
def test_unwritable_output_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], file: str, unfit: str
) -> None:
    def works(*_: Any, **__: Any) -> None:
        raise AssertionError("it worked before it found that it cannot write")

    monkeypatch.setattr(of_explain, "find_lateness", works)
    monkeypatch.setattr(of_run, "load_locations", works)
    monkeypatch.setattr(of_conformance, "read_scenarios", works)
    monkeypatch.setattr(of_setup, "resolve_jars", works)
    place = tmp_path / "there"
    if unfit == "below a file":
        place.write_text("a file")
        place /= file
    elif file == "x":
        place.write_text("a file")
    else:
        place.mkdir()
    done = CliRunner().invoke(app, [*arguments, str(place)])
    assert isinstance(done.exception, StorageError), done.exception
    said = str(done.exception)
    assert re.match(r"expected a (file to write|directory to write to), got '\S*/there(/x)?'", said), (
        said
    )
    assert re.search("; name another (file|one)$", said)


def test_init_in_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:  # instead of permissions: root may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied", "my_shop_of_test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refused)
    done = CliRunner().invoke(app, ["init", "my_shop_of_test"])
    assert isinstance(done.exception, StorageError), done.exception
    assert "got 'my_shop_of_test': Permission denied" in str(done.exception)


def test_picture_creates_missing_directory(tmp_path: Path) -> None:
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    picture = tmp_path / "out" / "of" / "x.svg"
    arguments = ["lateness", "prices", "--picture", str(picture), "--warehouse", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert picture.read_text().startswith("<svg")


def test_version_option() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"vt-dagster {version('vt-dagster')}\n"


def test_neither_spark_nor_dagster_is_imported() -> None:
    """Importing Spark and Dagster takes seconds. The commands that only read do not import them."""
    code = "import sys\n"
    for module in ("cli.lookup", "cli.explain", "explore.app"):
        code += (
            f"import vt_dagster.{module}\n"
            f"print('{module}', sorted({{'pyspark', 'dagster', 'pandera'}} & {{*sys.modules}}))\n"
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cli.lookup []\ncli.explain []\nexplore.app []\n"


def test_public_names_are_listed() -> None:
    assert {"VersionedTable", "build_definitions", "read"} <= {*dir(vt_dagster)}


def test_as_known_at_option(market: Market) -> None:
    """``q2`` of the key ``b`` came with the second run: as known before that run, ``b`` is ``q1``."""
    first, second = commit_log.commits(str(market.warehouse / "prices"))
    about = {"VT_DAGSTER_WAREHOUSE": str(market.warehouse), "COLUMNS": "300"}

    def told(command: str, *more: str) -> Result:
        return CliRunner().invoke(app, [command, "prices", "--key", "b", *more], env=about)

    before, after = (in_utc(one.recorded_at) for one in (first, second))
    at = ("--as-of", "2024-01-01T13:00:00Z")
    for known, value in ((before, "q1"), (after, "q2")):
        for asked in ((), at):
            found = told("get", *asked, "--as-known-at", known).output
            assert re.search(rf"^v +{value}$", found, re.MULTILINE)
    when = re.escape(after.replace("T", " ").removesuffix("Z").rstrip("0"))
    assert re.search(rf"v=q2 .*│ {when}", told("history").output)
    then = told("history", "--as-known-at", before).output
    assert ("v=q1" in then, "v=q2" in then) == (True, False)
    nothing = told("get", "--as-known-at", "2020-01-01")
    assert "no data existed before it" in str(nothing.exception)
