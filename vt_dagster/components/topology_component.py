"""The component: turns the entries of a YAML file into Dagster definitions."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field, ValidationError

from vt_dagster.components.yaml_assets import (
    CONCEPTS,
    AssetPart,
    Choice,
    Part,
    is_template,
    make_asset,
    optional,
    part,
)
from vt_dagster.errors import DefinitionsError, VtDagsterError
from vt_dagster.orchestration.checks import build_checks
from vt_dagster.orchestration.factory import build_asset, build_maintenance, build_resources
from vt_dagster.orchestration.resources import SparkResource
from vt_dagster.orchestration.sensors import build_partition_sensor, build_sensor, has_sensor
from vt_dagster.topology.model import Stream

_SCAFFOLD = """\
type: {type}
attributes:
  warehouse: data/warehouse
  assets:
    - name: prices
      versioned_table:
        key: product
        columns:
          product: string
          price: {{type: double, ge: 0}}
          at: timestamp
        timestamp: at
        history_retention: 30d
        source:
          files: {{path: data/landing/prices, format: csv}}
    # - name: cheap
    #   filter: {{input: prices, predicate: "price < 1"}}
"""

_SPARK = part("Spark", [SparkResource], ["master"], master=(str, "local[*]"))


_MAINTENANCE = part("Maintenance", [build_maintenance], ["nodes", "resource_prefix"])
_PARTITION_SENSOR = part(
    "PartitionSensor",
    [build_partition_sensor],
    ["resource_prefix"],
    report=(str, Field(description="The Python path of an asset with partitions that reads a table.")),
    reads=(str, Field(description="The table: an asset of this file, or the Python path of one.")),
)


class TopologyAttributes(Part):
    """Streams and tables, in any order, and their warehouse."""

    assets: list[AssetPart] = Field(  # pyright: ignore[reportInvalidTypeForm]
        description="Streams and tables, in any order; one may be an input of another."
    )
    warehouse: optional(str) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None,
        description="The directory or URL of the tables. Without it, the project's definitions must "
        "provide the resources with vt_dagster.build_resources.",
    )
    spark: optional(_SPARK) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None, description="The Spark session; only together with warehouse."
    )
    maintenance: optional(_MAINTENANCE) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None,
        description="A job and schedule that maintain the tables of the warehouse, and truncate the "
        "logs of this file's assets by their log_retention; set it in one file only.",
    )
    partition_sensors: optional(list[_PARTITION_SENSOR]) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None,
        description="Sensors that re-run partitions of your assets after late changes of a table.",
    )


class _Scaffolder(dg.Scaffolder):
    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        """Writes a ``defs.yaml`` with a versioned table to start from."""
        if request.scaffold_format == "python":
            dg.scaffold_component(request, {})
            return
        text = _SCAFFOLD.format(type=request.type_name)
        if request.append:
            with request.target_path.open("a", encoding="utf-8") as file:
                file.write(f"---\n{text}")
        else:
            (request.target_path / "defs.yaml").write_text(text, encoding="utf-8")


@dg.scaffold_with(_Scaffolder)
class TopologyComponent(dg.Component):
    """Versioned tables, tables, streams and the results of operators, from their sources on."""

    def __init__(
        self, attributes: TopologyAttributes, position: dg.ResolutionContext | None = None
    ) -> None:
        self.attributes = attributes
        self._position = position

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return TopologyAttributes

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(description=cls.__doc__)

    @classmethod
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> TopologyComponent:
        """Renders templates, which Dagster leaves to the component, and validates the result."""
        here = context.resolution_context.at_path("attributes")
        given = (attributes or TopologyAttributes(assets=[])).model_dump(exclude_unset=True)
        try:
            made = TopologyAttributes.model_validate(_rendered(given, here))
        except ValidationError as error:
            (first, *_) = error.errors()
            raise DefinitionsError(_placed(here, first["loc"], first["msg"])) from None
        return cls(made, here)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        builder = _Builder(self.attributes.assets, self._position, context.defs_module_name)
        nodes = {name: builder.node(name) for name in builder.entries}
        resources = None
        if self.attributes.warehouse is not None:
            spark = None if self.attributes.spark is None else self.attributes.spark.values()
            session = None if spark is None else _session(json.dumps(spark, sort_keys=True))
            resources = build_resources(self.attributes.warehouse, session)
        made = dg.Definitions(
            assets=[build_asset(node) for node in nodes.values()],
            asset_checks=[build_checks(node) for node in nodes.values()],
            sensors=[
                build_sensor(node, **builder.sensors[name])
                for name, node in nodes.items()
                if has_sensor(node)
            ]
            + [
                builder.partition_sensor(number, about)
                for number, about in enumerate(self.attributes.partition_sensors or ())
            ],
            resources=resources,
        )
        if self.attributes.maintenance is None:
            return made
        upkeep = build_maintenance(*nodes.values(), **self.attributes.maintenance.values())
        return dg.Definitions.merge(made, upkeep)


@cache
def _session(settings: str) -> SparkResource:
    """Returns one resource for all files with equal settings: Dagster merges only identical objects."""
    return SparkResource(**json.loads(settings))


def _rendered(value: Any, context: dg.ResolutionContext) -> Any:
    """Renders templates only: Dagster would evaluate SQL texts like ``'x'`` as Python values."""
    if isinstance(value, dict):
        return {k: _rendered(v, context.at_path(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_rendered(v, context.at_path(i)) for i, v in enumerate(value)]
    return context.resolve_value(value) if is_template(value) else value


def _placed(context: dg.ResolutionContext | None, path: Any, message: str) -> str:
    """Adds the file, the line and the lines around it to a message."""
    for step in path:
        context = None if context is None else context.at_path(step)
    if context is None or context.source_position_tree is None:
        return message
    source = context.source_position_tree.source_error(context.path, "here", True)
    return f"{source.file_name}:{source.start_line_no}: {source.location}: {message}\n{source.snippet}"


class _Builder:
    """Makes the streams and tables of the entries, inputs first; errors get their place in the file."""

    def __init__(
        self, entries: list[Choice], position: dg.ResolutionContext | None, module: str
    ) -> None:
        self._position, self._module = position, module
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._made: dict[str, Stream] = {}
        self._open: list[str] = []
        self.sensors: dict[str, dict[str, Any]] = {}
        self.entries: dict[str, Any] = {}
        for number, entry in enumerate(entries):
            name: str = vars(entry)["name"]
            if name in self.entries:
                raise self._error(
                    ("assets", number, "name"), f"two assets have the name {name!r}; rename one of them"
                )
            self.entries[name] = entry
            self._paths[name] = ("assets", number, entry.chosen)

    def node(self, name: str) -> Stream:
        """Returns the stream or table of an entry."""
        if name not in self._made:
            entry, path = self.entries[name], self._paths[name]
            self._open.append(name)
            about = vars(entry)[entry.chosen]
            inputs = {
                role: self._input((*path, role), vars(about)[role])
                for role in CONCEPTS[entry.chosen].inputs
            }
            try:
                made, self.sensors[name] = make_asset(entry, inputs, self._imported)
            except VtDagsterError as error:
                raise self._error(self._nearest(path, about, str(error)), str(error)) from None
            self._made[name] = made
            self._open.pop()
        return self._made[name]

    def partition_sensor(self, number: int, about: Part) -> dg.SensorDefinition:
        """Makes the sensor of an entry of ``partition_sensors``."""
        place, values = ("partition_sensors", number), about.values()
        reads = self._input((*place, "reads"), values.pop("reads"))
        try:
            report = self._imported("report", path := values.pop("report"))
            if not isinstance(report, dg.AssetsDefinition):
                raise DefinitionsError(
                    f"expected report to be the Python path of an asset, got {path!r}, a "
                    f"{type(report).__name__}; name the function decorated with @dg.asset"
                )
            return build_partition_sensor(report, reads=reads, **values)
        except VtDagsterError as error:
            raise self._error((*place, "report"), str(error)) from None

    def _input(self, path: tuple[Any, ...], name: str) -> Stream:
        if name in self._open:
            raise self._error(path, f"{' -> '.join([*self._open, name])} is a cycle; break it")
        if name in self.entries:
            return self.node(name)
        if "." not in name:
            raise self._error(
                path,
                f"expected one of the assets of this file ({', '.join(sorted(self.entries))}), or the "
                f"Python path of one like my_project.tables.prices, got {name!r}",
            )
        try:
            found = self._imported(path[-1], name)
        except VtDagsterError as error:
            raise self._error(path, str(error)) from None
        if not isinstance(found, Stream):
            raise self._error(
                path, f"expected {name} to be a Stream or Table, got {type(found).__name__}; correct it"
            )
        return found

    def _imported(self, setting: str, path: str) -> Any:
        """Imports the object of a Python path; a leading dot stands for the project's ``defs``."""
        module, _, name = path.rpartition(".")
        try:
            return getattr(importlib.import_module(module or ".", self._module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise DefinitionsError(
                f"expected {setting} to be the Python path of an object, like my_project.schemas.Price,"
                f" got {path!r}: {error}"
            ) from None

    def _nearest(self, path: tuple[Any, ...], about: Part, message: str) -> tuple[Any, ...]:
        """Returns the path of the setting that a message names first, or that of the entry."""
        said = [
            (re.search(rf"(?<![\w.]){words}(?![\w.])", message), p) for p, words in _settings(about)
        ]
        found = [(match.start(), place) for match, place in said if match is not None]
        return (*path, *min(found)[1]) if found else path

    def _error(self, path: tuple[Any, ...], message: str) -> DefinitionsError:
        return DefinitionsError(_placed(self._position, path, message))


def _settings(about: Part) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path of each setting, and a regex for its name in messages."""
    for name in about.given:
        value = vars(about)[name]
        yield (name,), name.replace("_", "[_ ]")
        if isinstance(value, Part):
            yield from (((name, *place), words) for place, words in _settings(value))
        elif isinstance(value, dict):
            yield from (((name, key), re.escape(repr(key))) for key in value)
