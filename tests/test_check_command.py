"""``vt-dagster check``: its output, its JUnit file and its exit code."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import dagster as dg
import pytest
from typer.testing import CliRunner

from tests.market import Market
from vt_dagster import SparkResource, build_definitions
from vt_dagster.cli import app
from vt_dagster.cli.run import run_checks
from vt_dagster.errors import DefinitionsError, TopologyError

DEFINITIONS = """
import dagster as dg

@dg.asset(group_name="odd")
def one(): ...

@dg.asset
def other(): raise AssertionError("nothing is to be materialized")

@dg.asset_check(asset=one, description="there is nothing to say")
def fine():
    return dg.AssetCheckResult(passed=True)

@dg.asset_check(asset=one, description="keys are small", blocking=True)
def small():
    rows = dg.MetadataValue.table([dg.TableRecord({"key": "1000", "value": "x"})])
    return dg.AssetCheckResult(passed=False, metadata={"offending_rows": 3, "sample": rows})

@dg.asset_check(asset=other)
def strange():
    return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description="hm")

@dg.asset_check(asset=other)
def broken():
    raise ValueError("no such thing")
"""
WHOLE = (
    DEFINITIONS + "\ndefs = dg.Definitions([one, other], asset_checks=[fine, small, strange, broken])\n"
)


@pytest.fixture
def project_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return tmp_path


def check(*arguments: str) -> tuple[int, str]:
    """Runs ``vt-dagster check``; returns the exit code, and the output or the error."""
    done = CliRunner().invoke(app, ["check", *arguments])
    if isinstance(done.exception, DefinitionsError):
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_check_output_and_junit_file(project_dir: Path) -> None:
    (project_dir / "defs_of_check.py").write_text(WHOLE)
    code, said = check("-f", "defs_of_check.py", "--junit", "out/junit.xml")
    assert code == 1
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in said.splitlines() if "│" in row]
    assert ["one", "fine", "passed", ""] in rows
    assert ["one", "small", "failed", "3"] in rows
    assert ["1000", "x"] in rows
    assert ["other", "strange", "warned", ""] in rows
    assert ["other", "broken", "broken", ""] in rows
    assert "one: small: expected that keys are small" in said
    assert "other: broken: ValueError: no such thing" in said
    assert "other: strange: hm" in said

    suites = ElementTree.parse(project_dir / "out" / "junit.xml").getroot()
    counts = {s.attrib["name"]: [s.attrib[k] for k in ("tests", "failures", "errors")] for s in suites}
    assert counts == {"one": ["2", "1", "0"], "other": ["2", "0", "1"]}
    cases = {c.attrib["name"]: c for c in suites.iter("testcase")}
    assert cases["small"].attrib["classname"] == "one"
    (failure,) = cases["small"]
    assert (failure.tag, failure.attrib["message"]) == ("failure", "3 offending rows")
    assert "{'key': '1000', 'value': 'x'}" in (failure.text or "")
    assert [e.tag for e in cases["broken"]] == ["error"]
    assert [e.tag for e in cases["strange"]] == ["system-out"]
    assert list(cases["fine"]) == []


@pytest.mark.parametrize(
    ("selection", "code", "names"),
    [
        ("*", 1, {"fine", "small", "strange", "broken"}),
        ("one", 1, {"fine", "small"}),
        ("group:odd", 1, {"fine", "small"}),
    ],
)
def test_check_selection(project_dir: Path, selection: str, code: int, names: set[str]) -> None:
    (project_dir / "defs_of_check.py").write_text(WHOLE)
    assert check(selection, "-m", "defs_of_check")[0] == code
    from defs_of_check import defs  # pyright: ignore[reportMissingImports]

    assert {r.name for r in run_checks(defs, selection)} == names


def test_warnings_do_not_fail_command(project_dir: Path) -> None:
    text = DEFINITIONS + "\ndefs = dg.Definitions([one, other], asset_checks=[fine, strange])\n"
    (project_dir / "defs_of_warnings.py").write_text(text)
    assert check("-f", "defs_of_warnings.py")[0] == 0


def test_check_loads_workspace_and_lazy_definitions(project_dir: Path) -> None:
    lazy = "\n@dg.definitions\ndef defs():\n    return dg.Definitions([one], asset_checks=[fine])\n"
    (project_dir / "defs_of_module.py").write_text(DEFINITIONS + lazy)
    (project_dir / "defs_of_file.py").write_text(
        DEFINITIONS + "\ndefs = dg.Definitions([other], asset_checks=[strange])\n"
    )
    (project_dir / "workspace.yaml").write_text(
        "load_from:\n  - python_module: defs_of_module\n"
        "  - python_file: {relative_path: defs_of_file.py}\n"
    )
    code, said = check()
    assert code == 0
    assert "fine" in said
    assert "strange" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected Definitions to check, found no workspace.yaml"),
        (["-f", "none.py"], "expected a Python file with Definitions, got none.py"),
        (["-m", "nowhere.definitions"], "expected a module 'nowhere.definitions', found none"),
        (["-m", ""], "expected a module '', found none; correct the name"),
        (["-m", "..definitions"], "expected a module '..definitions', found none; correct the name"),
        (["-f", "x.py", "-m", "x"], "expected either --file or --module, got both; drop one of them"),
        (["-f", "empty.py"], "expected one Definitions object in empty.py, found 0"),
        (["three", "-f", "whole.py"], "got 'three'; choose from ['one', 'other']"),
        (["((", "-f", "whole.py"], "got '(('; choose from ['one', 'other']"),
        (["group:none", "-f", "whole.py"], "expected assets with checks in the selection 'group:none'"),
    ],
)
def test_refused_arguments(project_dir: Path, arguments: list[str], said: str) -> None:
    (project_dir / "empty.py").write_text("")
    (project_dir / "whole.py").write_text(WHOLE)
    code, message = check(*arguments)
    assert code == 2
    assert said in message


def test_results_are_stored_in_instance(project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project_dir / "home").mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(project_dir / "home"))
    (project_dir / "defs_of_check.py").write_text(WHOLE)
    check("-f", "defs_of_check.py")
    with dg.DagsterInstance.get() as instance:
        (record,) = instance.get_run_records()
    assert record.dagster_run.job_name == "vt_dagster_check"


@pytest.mark.parametrize("home", ["missing", "broken"])
def test_unusable_instance_is_refused(
    project_dir: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (project_dir / "broken").mkdir()
    (project_dir / "broken" / "dagster.yaml").write_text("storage: [")
    (project_dir / "defs_of_check.py").write_text(WHOLE)
    monkeypatch.setenv("DAGSTER_HOME", str(project_dir / home))
    code, said = check("-f", "defs_of_check.py")
    assert code == 2
    assert f"DAGSTER_HOME: expected a Dagster instance in {project_dir / home}, got: " in said


def test_check_of_real_tables(market: Market, tmp_path: Path) -> None:
    """All checks of a healthy market pass. After another writer duplicated the rows of a view, the
    check for duplicate versions fails."""
    copy = market.copy(tmp_path / "copy")
    spark = SparkResource(master="local[2]")
    defs = build_definitions(copy.priced, copy.rates, warehouse=str(copy.warehouse), spark=spark)
    assert {r.verdict for r in run_checks(defs)} == {"passed"}
    path = str(copy.warehouse / "prices" / "view")
    rows = copy.spark.read.format("delta").load(path)
    rows.union(rows).write.format("delta").mode("overwrite").save(path)
    found = {r.name: r for r in run_checks(defs, "prices")}
    assert found["one_version_per_key_and_timestamp"].stops
    assert found["one_version_per_key_and_timestamp"].sample
    assert not found["every_record_is_accounted_for"].stops


def test_check_of_empty_warehouse_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rates.py"
    path.write_text(RATES.format(root=tmp_path), encoding="utf-8")
    result = CliRunner().invoke(app, ["check", "--file", str(path)], env={"COLUMNS": "300"})
    assert (result.exit_code, result.output.count("passed")) == (0, 2)
    said = f"rates: its checks looked at nothing: there are no tables in {tmp_path / 'rates'}"
    assert result.output.count(said) == 1


def test_warehouse_of_variable_that_is_not_valid(
    project_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RATES.replace('"{root}"', 'dg.EnvVar("LAKE")')
    (project_dir / "rates.py").write_text(f"import dagster as dg\n{text}", encoding="utf-8")
    monkeypatch.delenv("LAKE", raising=False)
    for command in ("check", "plan", "run"):
        done = CliRunner().invoke(app, [command, "-f", "rates.py"])
        assert isinstance(done.exception, DefinitionsError), done.exception
        assert 'environment variable "LAKE" which is not set' in str(done.exception)
        assert "Stack Trace" not in str(done.exception)
    monkeypatch.setenv("LAKE", "foo://lake")
    said = "WarehouseResource: path: expected a directory, or a URL that begins with"
    done = CliRunner().invoke(app, ["plan", "-f", "rates.py"])
    assert isinstance(done.exception, TopologyError)
    for command in ("check", "run"):
        done = CliRunner().invoke(app, [command, "-f", "rates.py"], env={"COLUMNS": "300"})
        assert done.exit_code == 1
        assert said in done.output
    failing = "import dagster as dg\n\n@dg.asset\ndef one(): raise ValueError('no')\n"
    (project_dir / "one.py").write_text(f"{failing}defs = dg.Definitions([one])", encoding="utf-8")
    assert CliRunner().invoke(app, ["run", "-f", "one.py"]).output.count("ValueError: no") == 1


RATES = """
from tests.market import RECORD
from vt_dagster import FilesSource, Table, build_definitions

rates = Table("rates", key="k", schema=RECORD, timestamp="at", source=FilesSource("landing"))
defs = build_definitions(rates, warehouse="{root}")
"""


def test_run_omits_assets_with_partitions(project_dir: Path) -> None:
    """Such assets may have different partitions, of which Dagster makes no job."""
    (project_dir / "defs_of_partitions.py").write_text("""
import dagster as dg

@dg.asset
def plain(): ...

@dg.asset(partitions_def=dg.DailyPartitionsDefinition("2024-01-01"), deps=[plain])
def daily(): ...

@dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a"]), deps=[plain])
def by_name(): ...

@dg.asset(deps=[daily])
def report(): ...

defs = dg.Definitions([plain, daily, by_name, report])
""")
    done = CliRunner().invoke(app, ["run", "-f", "defs_of_partitions.py"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "leaves out by_name, daily, report: assets with partitions" in done.output
    done = CliRunner().invoke(app, ["run", "daily", "-f", "defs_of_partitions.py"])
    assert isinstance(done.exception, DefinitionsError)
    assert "without a partition in the selection 'daily', got none" in str(done.exception)


@pytest.mark.parametrize("command", ["check", "run"])
def test_definitions_with_custom_loggers(project_dir: Path, command: str) -> None:
    """Definitions may have their own loggers: then Dagster has no logger ``console`` to silence."""
    logs = "\n@dg.logger\ndef mine(context): return __import__('logging').getLogger('mine')\n"
    defs = "\ndefs = dg.Definitions([one], asset_checks=[fine], loggers={'mine': mine})\n"
    (project_dir / "defs_of_loggers.py").write_text(DEFINITIONS + logs + defs)
    done = CliRunner().invoke(app, [command, "-f", "defs_of_loggers.py"])
    assert done.exit_code == 0, (done.output, done.exception)
