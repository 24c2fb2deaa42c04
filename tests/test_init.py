"""The project that ``vt-dagster init`` makes loads, runs and passes its own test."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

import vt_dagster
from tests.conftest import ConnectServer, output_of
from vt_dagster.cli import app
from vt_dagster.errors import DefinitionsError
from vt_dagster.testing import TopologyTestDriver

pytestmark = [  # warnings of Dagster's own code when it loads a folder of definitions
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning"),
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory; the imported modules of projects in it are unloaded after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds the directory of its project
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("corner_shop", "market_hall", "test_prices"):
            del sys.modules[name]


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def enter_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the directory and the import path as for a command that runs in the project's directory."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.syspath_prepend(str(project / "tests"))


def project_test() -> Any:
    (found,) = (v for k, v in vars(import_module("test_prices")).items() if k.startswith("test_"))
    return found


def prices_of(rows: Any) -> dict[int, float | None]:
    return {row["order_id"]: row["price"] for row in rows.to_pylist()}


def test_yaml_project(work_dir: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    assert init("market_hall", "--yaml").exit_code == 0
    enter_project(work_dir / "market_hall", monkeypatch)
    (work_dir / "elsewhere").mkdir()
    project_test()(work_dir / "elsewhere", monkeypatch)
    found = prices_of(vt_dagster.read("priced_orders", warehouse="data/warehouse"))
    assert found == {1: 1.0, 2: 3.0, 3: 1.2, 4: 1.4}
    require_equal_plan(work_dir, monkeypatch, spark)


def require_equal_plan(here: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    """A plan finds the tables of a YAML file, and equals the plan of the same tables in Python."""
    project = here / "market_hall"
    declared = project / "market_hall" / "defs" / "prices" / "defs.yaml"
    Path("workspace.yaml").write_text("load_from:\n  - python_module: market_hall.definitions\n")

    def planned(*options: str) -> tuple[int, Any]:
        done = CliRunner().invoke(app, ["plan", "--json", *options])
        assert done.exit_code in (0, 3), (done.output, done.exception)
        return done.exit_code, json.loads(done.stdout)

    code, unchanged = planned()
    assert code == 0
    assert unchanged["warehouse"] == str(here / "elsewhere" / "data" / "warehouse")
    verdicts = {one["asset"]: one["verdict"] for one in unchanged["assets"]}
    assert verdicts == dict.fromkeys(("prices", "orders", "priced_orders"), "unchanged")

    monkeypatch.chdir(project)
    code, new = planned()  # without a workspace.yaml: the project itself
    assert (code, [one["verdict"] for one in new["assets"]]) == (0, ["new", "new", "new"])
    monkeypatch.chdir(here / "elsewhere")

    text = declared.read_text().replace("right.price,", "right.price * 2 as price,")
    declared.write_text(text.replace("history_retention: 30d", "history_retention: 40d"))
    code, changed = planned()
    assert code == 3
    verdicts = {one["asset"]: one["verdict"] for one in changed["assets"]}
    assert verdicts == {"prices": "goes_on", "orders": "unchanged", "priced_orders": "needs_replay"}
    for place in (project, declared):
        assert planned("--file", str(place)) == (code, changed)
    monkeypatch.chdir(here)
    assert init("corner_shop").exit_code == 0
    enter_project(here / "corner_shop", monkeypatch)
    monkeypatch.chdir(here / "elsewhere")
    python = here / "corner_shop" / "corner_shop" / "defs" / "prices.py"
    text = python.read_text().replace('"right.price",', '"right.price * 2 as price",')
    python.write_text(text.replace("days=30", "days=40"))
    assert planned("--module", "corner_shop.defs.prices") == (code, changed)

    def asked(*words: str) -> Result:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    monkeypatch.setattr("vt_dagster.cli.tables.build_session", lambda _: spark)
    said = asked("restate", "priced_orders", "--from", "2026-01-31", "--dry-run", "-f", str(declared))
    assert said.output.endswith("would recompute: priced_orders\n")
    assert "catalog" in str(CliRunner().invoke(app, ["catalog", "-f", str(declared)]).exception)
    said = asked("replay", "--planned")
    assert said.output.splitlines()[-2:] == [
        "priced_orders: swapped; priced_orders_new has the earlier tables",
        "replayed and swapped: priced_orders",
    ]
    found = prices_of(vt_dagster.read("priced_orders", warehouse="data/warehouse"))
    assert found == {1: 2.0, 2: 6.0, 3: 2.4, 4: 2.8}
    code, done = planned("--asset", "priced_orders")
    assert (code, done["assets"][0]["verdict"]) == (0, "unchanged")
    said = asked("run", "orders", "-f", str(declared))
    assert said.output.startswith("nothing new for orders\n")


def test_init_folder_in_existing_project(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder uses its project's resources; for a module with two warehouses, the user must choose."""
    defs = work_dir / "corner_shop" / "defs"
    for name in ("orders", "returns"):
        (defs / name).mkdir(parents=True)
        (work_dir / name).mkdir()
        (defs / name / "defs.yaml").write_text(
            "type: vt_dagster.components.TopologyComponent\nattributes:\n"
            f"  assets: [{{name: {name}, stream: {{key: id, timestamp: at, "
            f"columns: {{id: string, at: timestamp}}, source: {{files: {{path: {name}}}}}}}}}]\n"
        )
    (defs / "resources.py").write_text(
        "import dagster as dg, vt_dagster\n\n"
        "defs = dg.Definitions(resources=vt_dagster.build_resources('here'))\n"
    )
    (work_dir / "pyproject.toml").write_text("[tool.dg.project]\nroot_module = 'corner_shop'\n")
    (work_dir / "two.py").write_text(
        "import dagster as dg, vt_dagster\nfrom pathlib import Path\n"
        "from tests.test_plan import shop\n\n"
        "nodes = shop(Path('.'), of_orders={'source': vt_dagster.FilesSource('orders')})\n"
        "one = vt_dagster.build_definitions(nodes[1], warehouse='here')\n"
        "prices = vt_dagster.build_definitions(nodes[0], warehouse='there', resource_prefix='x')\n"
        "both = [dg.Definitions.merge(one, prices)]\ndel one, prices\ndefs = both.pop()\n"
    )
    (work_dir / "prices").mkdir()

    def planned(*options: str) -> Any:
        done = CliRunner().invoke(app, ["plan", "--json", *options])
        if done.exit_code:
            assert isinstance(done.exception, DefinitionsError)
            return str(done.exception)
        document = json.loads(done.stdout)
        return document["warehouse"], [(one["asset"], one["verdict"]) for one in document["assets"]]

    place = str(work_dir / "here")
    assert planned() == (place, [("orders", "new"), ("returns", "new")])
    assert planned("--file", "corner_shop/defs/returns") == (place, [("returns", "new")])
    assert "expected a defs.yaml or a folder of a dg project" in planned("--file", "nowhere.yaml")
    text = (defs / "returns" / "defs.yaml").read_text()
    (defs / "returns" / "defs.yaml").write_text(text.replace("key: id", "key: nothing"))
    assert "key columns ['nothing'] are not in the schema" in planned()
    # Values that Dagster refuses before the component is loaded.
    (defs / "returns" / "defs.yaml").write_text(text.replace("key: id", "key: 5"))
    said = planned()
    assert re.search(r"got: 1 validation error .*\.key at \S+returns/defs\.yaml:3`", said, re.DOTALL)
    assert "For further information" not in said
    (defs / "returns" / "defs.yaml").write_text(text.replace("key: id", "key: [id"))
    said = planned()
    assert said.startswith("expected a valid YAML file, got: while parsing")
    assert 'returns/defs.yaml", line 3' in said
    (defs / "returns" / "defs.yaml").write_text(text)
    assert f"got those of ['{place}', '{work_dir / 'there'}']; choose one" in planned("-f", "two.py")
    assert planned("-f", "two.py", "--warehouse", "there") == ("there", [("prices", "new")])


def test_python_project(work_dir: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    """A run reports its new rows, and the project's own test passes."""
    made = init("corner_shop")
    assert made.exit_code == 0, made.output
    for target in re.findall(r"make (\w+)", made.output):
        assert re.search(
            rf"^{target}:", (work_dir / "corner_shop" / "Makefile").read_text(), re.MULTILINE
        )
    enter_project(work_dir / "corner_shop", monkeypatch)
    project_test()(lambda node: TopologyTestDriver(node, spark=spark))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("DAGSTER_HOME", str(work_dir))  # keeps the first run's events for the second run
    module = "-m", "corner_shop.definitions"
    said = CliRunner().invoke(app, ["run", *module, "--rows", "1"])
    assert said.exit_code == 0, said.output
    lines = [line.rstrip() for line in said.stdout.splitlines() if line.strip()]
    assert set(lines[:2]) == {"prices: 4 in = 4 applied", "orders: 5 in = 5 applied"}
    assert lines[2:5] == [
        "priced_orders: 5 in = 4 applied + 1 waiting; 4 out",
        "checks: 12 of 12 passed",
        "new rows of priced_orders: 4, of which 1",
    ]
    assert lines[5].split() == ["order_id", "product", "ordered_at", "price", "priced_from"]
    assert len(lines) == 10
    # In order of arrival, the last apple would cost 1.2. The newest order waits.
    found = prices_of(vt_dagster.read("priced_orders", warehouse="data/warehouse"))
    assert found == {1: 1.0, 2: 3.0, 3: 1.2, 4: 1.4}
    ask = shlex.split(lines[8].removeprefix("explain the first row: vt-dagster "))
    why = CliRunner().invoke(app, ask)
    assert why.exit_code == 0, why.output
    assert "order_id=1 " in why.stdout
    said = CliRunner().invoke(app, ["run", *module])
    assert "nothing new for orders, priced_orders, prices\n" in said.stdout
    monkeypatch.delenv("DAGSTER_HOME")  # this instance knows no run
    said = CliRunner().invoke(app, ["run", *module])
    assert "nothing new for orders, priced_orders, prices\n" in said.stdout
    assert " in = " not in said.stdout
    assert "new rows of" not in said.stdout
    monkeypatch.setenv("DAGSTER_HOME", str(work_dir))

    prices = Path("data/landing/prices")
    (prices / "2.csv").write_text("product,price,at\npear,-1,2026-01-31T16:00:00Z\n")
    said = CliRunner().invoke(app, ["run", "prices", *module])
    assert said.exit_code == 1
    assert "nothing was committed" in said.stderr
    (prices / "2.csv").write_text("product,price,at\npear,101,2026-01-31T16:00:00Z\n")
    said = CliRunner().invoke(app, ["run", "prices", *module])
    assert said.exit_code == 1, said.output
    assert "prices: prices_are_plausible: did not pass\n" in said.stderr
    assert "new rows of prices: 1" in said.stdout
    refused = CliRunner().invoke(app, ["run", "nothing_of_it", *module])
    assert isinstance(refused.exception, DefinitionsError)


def test_definitions_list_fits_80_columns(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of 80 columns, each check takes one line, and the whole list less than 80 lines."""
    assert init("corner_shop").exit_code == 0
    monkeypatch.setenv("DAGSTER_HOME", str(work_dir))
    (work_dir / "dagster.yaml").write_bytes((work_dir / "corner_shop" / "dagster.yaml").read_bytes())
    monkeypatch.chdir(work_dir / "corner_shop")
    told = output_of("dg", "list", "defs", columns=80)
    rows = [
        row.splitlines()
        for row in re.split(r".*(?:├|┡|└).*\n", told)
        if "prices:" in row or "orders:" in row
    ]
    assert len(rows) >= 10
    assert {len(row) for row in rows} == {1}
    assert len(told.splitlines()) < 80


def test_instance_disables_telemetry_and_nux(work_dir: Path) -> None:
    """Telemetry is off, and Dagster's form for an email address (``nux``) is off too."""
    assert init("corner_shop").exit_code == 0
    with dg.DagsterInstance.from_config(str(work_dir / "corner_shop")) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled


def test_debug_log_is_in_the_project_wherever_a_command_runs(work_dir: Path) -> None:
    assert init("corner_shop").exit_code == 0
    for name in ("corner_shop", "moved"):
        if name == "moved":
            (work_dir / "corner_shop").rename(work_dir / name)
        home = work_dir / name / "data" / "dagster_home"
        subprocess.run(["make", f"{home}/dagster.yaml"], cwd=work_dir / name, check=True)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            (handler,) = instance.get_settings("python_logs")["dagster_handler_config"][
                "handlers"
            ].values()
        assert handler["filename"] == f"{home}/debug.log"
        assert [one.name for one in home.glob("dagster*")] == ["dagster.yaml"]


@pytest.mark.jvm
@pytest.mark.slow
def test_project_commands_share_spark_server(work_dir: Path, connect_server: ConnectServer) -> None:
    """A run, checks and tests use the running server; Dagster's debug log goes to a file."""
    environment = {
        **connect_server.environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "100",
    }

    def make(*targets: str) -> str:
        done = subprocess.run(
            ["make", "--no-print-directory", *targets],
            cwd=work_dir / "corner_shop",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert init("corner_shop").exit_code == 0
    landing = work_dir / "corner_shop" / "data" / "landing"
    (landing / "prices" / "2.csv").write_text("product,price,at\npear,2.5,2026-01-31T16:00:00Z\n")
    (landing / "orders" / "2.csv").write_text(
        "order_id,product,ordered_at\n6,apple,2026-01-31T18:00:00Z\n"
    )
    said = make("run", "test", "check")
    ran, _, tested = said.partition("next: make look")
    assert ran.startswith("the Spark server was already running: ")
    assert said.count("the Spark server was already running: ") == 1, "asked once for all targets"
    assert len(ran.splitlines()) < 25
    assert "DEBUG" not in ran
    assert re.search(r"^ +5 +pear +2026-01-31 16:30:00 +2\.5 +2026-01-31 16:00:00", ran, re.M)
    log = (work_dir / "corner_shop" / "data" / "dagster_home" / "debug.log").read_text()
    assert "STEP_SUCCESS" in log
    assert "1 passed" in tested
    assert "failed" not in tested.rpartition("1 passed")[2]
    assert make("--dry-run", "stop") == "vt-dagster spark stop\n"  # other tests use this server


@pytest.mark.parametrize("flavour", [[], ["--yaml"]])
def test_no_template_placeholder_is_left(work_dir: Path, flavour: list[str]) -> None:
    assert init("corner_shop", *flavour).exit_code == 0
    made = [p for p in (work_dir / "corner_shop").rglob("*") if p.is_file()]
    assert {p.suffix for p in made} <= {"", ".py", ".toml", ".csv", ".yaml"}
    assert len(made) == 13
    for path in made:
        assert "NAME" not in path.read_text()


@pytest.mark.parametrize("name", ["Shop", "my-shop", "1shop", "class", "", "../shop", "shop/eu"])
def test_invalid_project_name_is_refused(work_dir: Path, name: str) -> None:
    refused = init(name)
    assert isinstance(refused.exception, DefinitionsError)
    assert f"got {name!r}: choose another name" in str(refused.exception)
    assert list(work_dir.iterdir()) == []


def test_existing_directory_is_not_overwritten(work_dir: Path) -> None:
    (work_dir / "corner_shop").mkdir()
    refused = init("corner_shop")
    assert isinstance(refused.exception, DefinitionsError)
    assert "got 'corner_shop', which already exists" in str(refused.exception)
    assert list((work_dir / "corner_shop").iterdir()) == []


def test_name_of_importable_package_is_refused(work_dir: Path) -> None:
    refused = init("dagster")
    assert isinstance(refused.exception, DefinitionsError)
    assert "which can be imported here and would be hidden" in str(refused.exception)
    assert list(work_dir.iterdir()) == []
