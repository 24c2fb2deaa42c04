"""An erase finds the Dagster runs whose events contain the key. The steps that it names there remove
it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_shared.serdes import serialize_value

from tests.market import QUIET
from vt_dagster.orchestration.sensors import runs_with

ERIN = "erin-6b1f2a"
KEY = dg.AssetKey("customers")


@dg.asset
def customers(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
    return dg.MaterializeResult(metadata={"timeline": dg.MetadataValue.md(context.run.tags["who"])})


@dg.multi_asset_check(specs=[dg.AssetCheckSpec("overlap", asset=KEY)])
def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
    sample = dg.MetadataValue.table([dg.TableRecord({"customer": context.run.tags["sampled"]})])
    yield dg.AssetCheckResult(check_name="overlap", passed=False, metadata={"sample": sample})


@dg.asset
def other(context: dg.AssetExecutionContext) -> None:
    context.log.info(ERIN)


def remaining_events(instance: dg.DagsterInstance, runs: list[str]) -> list[str]:
    """The events of these runs, and of the check, in Dagster's storage that still contain the key."""
    found = [str(one) for run in runs for one in instance.get_records_for_run(run).records]
    of_check = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(KEY, "overlap"), limit=10
    )
    found += [serialize_value(one.event) for one in of_check if one.event is not None]
    return [one for one in found if ERIN in one]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_erase_names_runs_with_key_and_remedies(tmp_path: Path) -> None:
    runs, instance = list[str](), dg.DagsterInstance.local_temp(str(tmp_path))
    for who, sampled in (("ada", "bob"), (f"its {ERIN}", "bob"), ("ada", ERIN), ("ada", "bob")):
        done = dg.materialize(
            [customers, check],
            instance=instance,
            run_config=QUIET,
            tags={"who": who, "sampled": sampled},
        )
        runs.append(done.run_id)
    dg.materialize([other], instance=instance, run_config=QUIET)
    found = runs_with(instance, [KEY], [ERIN])
    assert found == runs[1:3]
    assert runs_with(instance, [KEY], [ERIN, "nobody"]) == []
    assert remaining_events(instance, runs)
    for run in found:
        instance.delete_run(run)
    assert remaining_events(instance, runs)  # check results are stored separately
    instance.wipe_assets([KEY])
    assert remaining_events(instance, runs) == []
    assert runs_with(instance, [KEY], [ERIN]) == []
