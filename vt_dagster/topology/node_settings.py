"""Changes settings of a declared stream or table, for what-if runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

from vt_dagster.errors import ContractError, TopologyError
from vt_dagster.topology.durations import parse_length
from vt_dagster.topology.model import Stream, Table

_SHOWN = ("description", "group", "owners", "key_prefix")
_FIXED = frozenset(
    {"name", "schema", "operator", "contract", "inputs", "left", "right", "source", "sources"}
)


def with_settings(node: Stream, settings: Mapping[str, str]) -> Stream:
    """Returns a copy of a stream or table with changed settings of its own or of its operator.

    Args:
        settings: values by name, or by path for nested settings, ``window.grace``. Values are texts:
            durations like ``2h``, JSON, or plain text.

    Raises:
        TopologyError: an unknown setting, or an invalid value.
    """
    for name, text in settings.items():
        first = name.partition(".")[0]
        operator: Any = node.operator
        if operator is not None and first in settable(operator):
            shown: dict[str, Any] = {one: getattr(node, one) for one in _SHOWN}
            if isinstance(node, Table):
                shown["freshness"] = node.freshness
            node = _set(node.name, operator, name, text).result(**shown)
        elif operator is None and first in settable(node):
            node = _set(node.name, node, name, text)
        else:
            there = settable(node if operator is None else operator)
            raise TopologyError(f"{node.name}: expected one of the settings {there}, got {name!r}")
    return node


def settable(owner: Any) -> list[str]:
    """Returns the names of the settings of an operator or a source asset."""
    return sorted(f.name for f in fields(owner) if f.name not in _FIXED)


def _set(asset: str, owner: Any, name: str, text: str) -> Any:
    first, _, rest = name.partition(".")
    there = settable(owner)
    if first not in there:
        raise TopologyError(f"{asset}: expected one of the settings {there}, got {first!r}")
    value = getattr(owner, first)
    if rest:
        if not is_dataclass(value):
            raise TopologyError(
                f"{asset}: expected a setting with nested settings, got {name!r} of {value!r}"
            )
        return replace(owner, **{first: _set(asset, value, rest, text)})
    return replace(owner, **{first: _value(value, text)})


def _value(now: Any, text: str) -> Any:
    """Parses a text as the type of the current value; without one, by its form."""
    if isinstance(now, str):
        return text
    if now is None or isinstance(now, timedelta):
        try:
            return parse_length(text)
        except ContractError:
            if now is not None:
                raise
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return tuple(found) if isinstance(found, list) else found  # pyright: ignore
