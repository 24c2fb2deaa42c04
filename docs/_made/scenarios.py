"""The recorded scenarios of Kafka Streams, by the page of the operator that they show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from timeline import picture

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
WORKED = [CONFORMANCE / "worked", CONFORMANCE / "streams" / "worked.json", CONFORMANCE / "optional"]
PAGES = {
    "versioned_store": "versioned-table",
    "table_table_join": "table-table-join",
    "foreign_key_join": "foreign-key-join",
    "table_filter": "filter-map-values",
    "table_map_values": "filter-map-values",
    "table_aggregate": "aggregate",
    "table_suppress": "suppress",
    "chain": "when-versioned",
    "global_table": "when-versioned",
    "stream_merge": "streams",
    "stream_select_key": "streams",
    "stream_flat_map_values": "streams",
    "stream_stream_join": "stream-stream-join",
}
SHOWN_AT_ONCE = 3
"""So many pictures of a page are open; the others open by a click."""
ORIGIN = {
    "printed": "the KIP's own example",
    "stated": "a rule of the KIP",
    "probe": "a detail that the KIP leaves open",
}

Scenario = Mapping[str, Any]


def page_of(scenario: Scenario) -> str:
    config = scenario["config"]
    if scenario["operator"] == "stream_table_join":
        return "stream-table-join" if config.get("grace") is None else "grace-period"
    if scenario["operator"] == "windowed_aggregate":
        return "suppress" if config.get("suppress") else "windows"
    return PAGES[scenario["operator"]]


@cache
def worked() -> dict[str, Scenario]:
    """All worked scenarios by name; ours where we want something else, with Kafka's beside it."""
    found: dict[str, Scenario] = {}
    for place in WORKED:
        for file in sorted(place.rglob("*.json")) if place.is_dir() else [place]:
            content = json.loads(file.read_text(encoding="utf-8"))
            for one in content if isinstance(content, list) else [content]:
                if "max_bytes" not in json.dumps(one["config"]):
                    found[one["name"]] = one
    return found


def scenarios(page: str, first: list[str]) -> str:
    """The pictures of a page, those in ``first`` before the others."""
    mine = {name: one for name, one in worked().items() if page_of(one) == page}
    if unknown := set(first) - set(mine):
        raise ValueError(f"{page}: expected scenarios of this page, got {unknown}: correct the marker")
    names = [*first, *(name for name in mine if name not in first)]
    return "\n".join(_shown(mine[n], number < SHOWN_AT_ONCE) for number, n in enumerate(names))


def _shown(scenario: Scenario, at_once: bool) -> str:
    ours = {**scenario, **(scenario.get("by_design") or {})}
    lines = [f"{_heading(scenario)}", "", f"`{_config(scenario['config'])}`", ""]
    lines += _drawn(ours)
    if scenario.get("by_design"):
        lines += ["", "**Here it is otherwise by design**; Kafka Streams gives:", "", *_drawn(scenario)]
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    anchor = f'<a id="{scenario["name"]}"></a>\n\n'
    mark = "???+" if at_once else "???"
    return f'{anchor}{mark} example "{scenario["name"]}"\n\n{body}\n'


def _heading(scenario: Scenario) -> str:
    note, origin = scenario.get("note"), scenario.get("origin")
    about = f"{ORIGIN[origin][0].upper()}{ORIGIN[origin][1:]}. " if origin in ORIGIN else ""
    return about + _plain(note or "A recorded run of Kafka Streams 4.1.1.")


def _plain(text: str) -> str:
    """A text in which nothing is markup."""
    return re.sub(r"([*_\[\]])", r"\\\1", text.replace("<", "&lt;").replace(">", "&gt;"))


def _config(config: Mapping[str, Any]) -> str:
    def said(value: Any) -> str:
        if isinstance(value, dict):
            if value.get("versioned") is True:
                return f"versioned ({value['history_retention']} ms)"
            if value.get("versioned") is False:
                return "not versioned"
            return " ".join(f"{k} {said(v)}" for k, v in value.items() if v is not None)
        if isinstance(value, list):
            return " → ".join(said(v) for v in value)
        return str(value)

    told = [f"{name}: {said(value)}" for name, value in config.items() if value is not None]
    return "; ".join(told) or "no configuration"


def _drawn(scenario: Scenario) -> list[str]:
    error = scenario.get("expected_error")
    found = [f'<div class="timeline">{picture(scenario)}</div>'] if scenario["records"] else []
    if error:
        when = (
            "when definitions load" if error["at"] == "build" else f"at record {error['trigger'] + 1}"
        )
        found += ["", f"**Refused {when}**; Kafka Streams says: {_plain(error['message'] or '')}"]
    return found
