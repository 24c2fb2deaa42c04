"""The registry of options: what is made from an entry, and which consumer reads a table with it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Any, get_origin, get_type_hints

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from typing_extensions import Required

from vt_dagster import FilesSource, SnapshotSource, Stream, Table, VersionedTable
from vt_dagster.components.topology_component import CONCEPTS, AssetPart, described
from vt_dagster.orchestration.decorators import (
    StreamAttributes,
    TableAttributes,
    VersionedTableAttributes,
)
from vt_dagster.orchestration.metadata import definition_metadata
from vt_dagster.orchestration.translator import code_version
from vt_dagster.storage.asset_store import shape_of
from vt_dagster.storage.commit_log import Shape
from vt_dagster.topology.options import OPTIONS, Option

DAY = timedelta(days=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("n", IntegerType()),
        StructField("till", TimestampType()),
        StructField("at", TimestampType()),
    ]
)
WIDER = StructType([*SCHEMA.fields, StructField("w", StringType())])
NO_OPTIONS = {"name", "operator", "contract"}

VALUES: dict[str, Any] = {
    "key": ["k", "v"],
    "schema": WIDER,
    "timestamp": "till",
    "tombstone": "n < 0",
    "partitions": 3,
    "partition_by": "length(k)",
    "source": FilesSource("other"),
    "null_key": "keep",
    "description": "Prices.",
    "group": "shop",
    "owners": ["team:shop"],
    "key_prefix": "shop",
    "freshness": "every_run",
    "renamed": {"before": "v"},
    "log_retention": DAY,
    "broadcast": True,
    "deleted_when": "n < 0",
    "deleted_at": "till",
    "history_retention": 2 * DAY,
    "segment_interval": DAY,
    "ready": "initial_load",
    "tie_break": "n",
    "valid_until": "till",
    "start": SnapshotSource("dumps", dump_time="modified"),
    "new_version_on": ["v"],
    "only_columns": ["v"],
    "ignore_null_updates": True,
}
"""A value of each option, other than its default."""


def declared(option: str = "", **more: Any) -> Stream:
    """A node with one option more; of the kind that has most options, if it allows this one."""
    about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "timestamp": "at", **more}
    about |= {"source": FilesSource("landing")} if "source" not in more else {}
    about |= {option: VALUES[option]} if option else {}
    if option == "broadcast":
        return Table("prices", **about)
    if option == "null_key":
        return Stream("prices", **about)
    return VersionedTable("prices", **{"history_retention": DAY, **about})


def without(node: Stream) -> Stream:
    """The same kind of node without the option."""
    about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "timestamp": "at"}
    about |= {"history_retention": DAY} if isinstance(node, VersionedTable) else {}
    return type(node)("prices", source=FilesSource("landing"), **about)


def each(of: Any = lambda option: True) -> Any:
    found = [option for option in OPTIONS if of(option)]
    return pytest.mark.parametrize("option", found, ids=lambda option: option.name)


def test_each_field_is_an_option() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert set(names) == {f.name for f in fields(VersionedTable)} - NO_OPTIONS == set(VALUES)


def test_decorators_and_yaml_have_each_option() -> None:
    """A function is the source of its table, and has no changes that a start snapshot could precede."""
    of_function = {"name", "ins", "deps", "partitions_def", "required_resource_keys"}
    of_function |= {"max_bad_share", "max_clock_skew"}
    not_of = {Stream: {"freshness"}, Table: set[str](), VersionedTable: {"start", "broadcast"}}
    kinds = {Stream: StreamAttributes, Table: TableAttributes, VersionedTable: VersionedTableAttributes}
    concepts = {Stream: "stream", Table: "table", VersionedTable: "versioned_table"}
    shown = {*AssetPart.model_fields}
    for kind, attributes in kinds.items():
        names = {f.name for f in fields(kind)} - NO_OPTIONS
        assert set(get_type_hints(attributes)) == names - {"source"} - not_of[kind] | of_function
        hints = get_type_hints(attributes, include_extras=True)
        required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
        assert {n for n, hint in hints.items() if get_origin(hint) is Required} == required - {"name"}
        assert names <= {*CONCEPTS[concepts[kind]].yaml.model_fields} | shown


@each()
def test_an_option_has_a_text(option: Option) -> None:
    assert described(VersionedTable, option.name)


@each()
def test_the_code_version_changes_with_the_records(option: Option) -> None:
    node = declared(option.name)
    # An alias that is stored as tombstone.
    defines = option.defines_records or option.name == "deleted_when"
    assert (code_version(node) != code_version(without(node))) == defines


@each()
def test_metadata_shows_an_option(option: Option) -> None:
    now, before = (definition_metadata(n) for n in (declared(option.name), without(declared())))
    name = f"vt_dagster/{option.name}"
    assert (name in now) == option.shown or option.name in ("key", "source")
    if option.shown and option.name != "history_retention":
        assert name not in before


def test_values_are_shown_as_text() -> None:
    shown = {"deleted_at": "till", "tie_break": "n", "new_version_on": "v", "only_columns": "v"}
    shown |= {"ignore_null_updates": "all", "history_retention": "2 days", "log_retention": "1 day"}
    shown |= {"ready": "initial_load", "start": VALUES["start"].describe(), "valid_until": "till"}
    assert set(shown) == {option.name for option in OPTIONS if option.shown}
    for name, text in shown.items():
        assert definition_metadata(declared(name))[f"vt_dagster/{name}"] == text


@each(lambda option: option.in_commit)
def test_a_commit_keeps_an_option(option: Option) -> None:
    shape = Shape.model_validate_json(shape_of(declared(option.name)).model_dump_json())
    value = VALUES[option.name]
    assert getattr(shape, option.name) == value
    assert getattr(shape_of(declared()), option.name) is None
