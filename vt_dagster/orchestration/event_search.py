"""Searches Dagster's event storage for runs whose events contain a value, for example in samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

_PAGE = 1000


def runs_with(
    instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey], values: Sequence[object]
) -> list[str]:
    """Returns the runs of some assets that have an event with all values as text, oldest first.

    Runs that materialized, observed or checked the assets count. Reads all events of all runs.

    Args:
        values: of a key.
    """
    wanted, names = [str(value) for value in values], {key.to_user_string() for key in assets}
    found = list[str]()
    for run_id in reversed([*_runs(instance)]):
        events = [str(event) for event in _events(instance, run_id)]
        of_ours = any(name in event for name in names for event in events)
        if of_ours and any(all(value in event for value in wanted) for event in events):
            found.append(run_id)
    return found


def _runs(instance: dg.DagsterInstance) -> list[str]:
    """Returns the ids of all runs, newest first."""
    found, place = list[str](), None
    while True:
        page = instance.get_runs(limit=_PAGE, cursor=place)
        found += [run.run_id for run in page]
        if len(page) < _PAGE:
            return found
        place = page[-1].run_id


def _events(instance: dg.DagsterInstance, run_id: str) -> list[Any]:
    found, place = list[Any](), None
    while True:
        page = instance.get_records_for_run(run_id, cursor=place, limit=_PAGE)
        found += [record.event_log_entry for record in page.records]
        if not page.has_more:
            return found
        place = page.cursor
