"""The component: turns the entries of a YAML file into streams, tables and Dagster definitions.

Each kind of entry has a pydantic model, made from the parameters of a Python class or method. A new
parameter of such a class or method is thereby a new YAML setting. This module only converts YAML values
to Python values and words its errors; the Python classes check the values. Columns are Spark types as
texts, with pandera checks by name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T
from jinja2 import Undefined, UndefinedError
from jinja2.nativetypes import NativeEnvironment
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)

from vt_dagster.errors import ContractError, DefinitionsError, TopologyError, VtDagsterError
from vt_dagster.orchestration.alerts import build_alerts
from vt_dagster.orchestration.checks import build_checks
from vt_dagster.orchestration.factory import (
    build_asset,
    build_maintenance,
    build_resources,
    warehouse_at,
)
from vt_dagster.orchestration.resources import SparkResource
from vt_dagster.orchestration.sensors import build_partition_sensor, build_sensor, has_sensor
from vt_dagster.sources.delta_source import DeltaSource
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.frame_sources import AssetSource
from vt_dagster.sources.kafka_cluster import KafkaCluster
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.sources.message_formats import (
    Avro,
    Debezium,
    Format,
    Json,
    Protobuf,
    Raw,
    SchemaRegistry,
)
from vt_dagster.sources.snapshot_source import SnapshotSource
from vt_dagster.sources.value_reader import Unit
from vt_dagster.storage.catalog import require_names
from vt_dagster.topology.durations import CALENDAR_SIZES, parse_length
from vt_dagster.topology.model import (
    GroupedStream,
    GroupedTable,
    Stream,
    Table,
    VersionedTable,
    WindowedStream,
)
from vt_dagster.topology.node import Source
from vt_dagster.topology.operators import Materialized, UntilTimeLimit, UntilWindowCloses
from vt_dagster.topology.windows import HoppingWindow, SessionWindow, SlidingWindow, TumblingWindow

# Models of YAML entries


def is_template(value: Any) -> bool:
    """Returns whether a value is a template, for example ``{{ env.RETENTION }}``."""
    return isinstance(value, str) and "{{" in value


def as_duration(value: Any) -> Any:
    """Converts ``7d``, ``1h30m``, ``250ms`` to a timedelta; returns a template unchanged."""
    if isinstance(value, timedelta) or is_template(value):
        return value
    try:
        return parse_length(str(value))
    except ContractError as error:
        raise ValueError(str(error)) from None


def as_signed_duration(value: Any) -> Any:
    """As ``as_duration``, but the duration may be negative: ``-5m``."""
    if isinstance(value, str) and value.strip().startswith("-"):
        return -as_duration(value.strip()[1:])
    return as_duration(value)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_as(kind: Any, convert: Callable[[Any], Any]) -> Any:
    """Makes the YAML type of a text that is converted to a Python value."""
    return Annotated[kind | str, BeforeValidator(convert, json_schema_input_type=str)]


def _duration_or(*words: str) -> Any:
    """Makes the YAML type of a duration, or one of some words."""
    return _text_as(timedelta, lambda value: value if value in words else as_duration(value))


def _time_or(*words: str) -> Callable[[Any], Any]:
    """Makes a converter of a time, or one of some words; other values are unchanged."""

    def converted(value: Any) -> Any:
        is_number = isinstance(value, int | float)
        if not (isinstance(value, str) or is_number) or value in words or is_template(value):
            return value
        try:
            if is_number:  # fromisoformat takes some as a date
                raise ValueError(value)
            return datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(
                f"expected {', '.join(words)} or a time like 2024-06-01T00:00:00Z, got {value!r}"
            ) from None

    return converted


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _or_template(kind: Any) -> Any:
    """Makes the YAML type of a value that is no text, or of a template, which is rendered later."""

    def validated(value: Any, validate: Callable[[Any], Any]) -> Any:
        return value if is_template(value) else validate(value)

    return Annotated[kind, WrapValidator(validated), _OrTemplate]


class _OrTemplate:
    """Lets editors and `dg check yaml` accept a template, and otherwise name what is expected."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        return {"if": {"type": "string", "pattern": r"\{\{"}, "else": handler(core_schema)}


Whole = _or_template(Annotated[int, BeforeValidator(_no_boolean, json_schema_input_type=int)])
Number = _or_template(Annotated[float, BeforeValidator(_no_boolean, json_schema_input_type=float)])
Boolean = _or_template(bool)
DurationText = _text_as(timedelta, as_duration)
SignedDurationText = _text_as(timedelta, as_signed_duration)
Texts = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=list[str] | str)]


def _as_path(value: Any) -> Any:
    texts = _as_list(value)
    if not isinstance(texts, list):
        return texts
    parts = [[one] if is_template(one) else str(one).split("/") for one in cast(list[Any], texts)]
    return [part for some in parts for part in some]


PathText = Annotated[list[str], BeforeValidator(_as_path, json_schema_input_type=list[str] | str)]
"""The parts of a key prefix, or one text like ``shop/eu``."""


def _as_texts(value: Any) -> Any:
    """Converts numbers and booleans of a mapping to texts, as the classes do in Python."""
    if not isinstance(value, dict):
        return value
    return {
        name: str(one).lower() if isinstance(one, int | float) else one
        for name, one in cast("dict[Any, Any]", value).items()
    }


TextsByName = Annotated[
    dict[str, str],
    BeforeValidator(_as_texts, json_schema_input_type=dict[str, str | float | bool]),
]


class _NotNull:
    """Removes null from the JSON schema for editors and `dg check yaml`, since null is refused."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        found = handler(core_schema)
        kept = [one for one in found.pop("anyOf", []) if one != {"type": "null"}]
        return found | (kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {})


def optional(kind: Any) -> Any:
    """Returns the type of a setting that may be omitted."""
    return Annotated[kind | None, _NotNull]


def setting(kind: Any, description: str | None = None) -> Any:
    """Returns the field of a setting that may be omitted, as for pydantic's create_model."""
    return optional(kind), Field(default=None, description=description)


class Part(BaseModel):
    """A YAML mapping. The error for an unknown name lists the known ones."""

    model_config = ConfigDict(extra="forbid")
    target: ClassVar[Callable[..., Any] | None] = None
    """The class or function to call with the YAML's values."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_with_reasons(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        if isinstance(value, cls):
            return value
        value = cls._spelled_out(value)
        if not isinstance(value, dict):
            raise ValueError(f"expected some of {', '.join(cls.model_fields)}, got {value!r}")
        problems: list[Any] = [
            _problem((name,), None, f"{name} is empty: set a value, {{}} for defaults, or remove it")
            for name, given in value.items()
            if given is None
        ]
        if not problems:
            try:
                return validate(value)
            except ValidationError as error:
                problems = [cls._worded(problem) for problem in error.errors()]
        raise ValidationError.from_exception_data(cls.__name__, problems)

    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        """Expands a short form."""
        return value

    @classmethod
    def _worded(cls, problem: Any) -> Any:
        where = problem["loc"]
        if len(where) == 1 and problem["type"] == "missing":
            return _problem(where, problem["input"], f"{where[0]!r} is missing")
        if len(where) == 1 and problem["type"] == "extra_forbidden":
            name = str(where[0])
            words = {*name.lower().split("_")}
            near = difflib.get_close_matches(name, cls.model_fields, 1)
            near += [known for known in cls.model_fields if words < {*known.split("_")}]
            meant = f"did you mean {near[0]!r}? " if near else ""
            message = f"{name!r} is not known here; {meant}expected {', '.join(cls.model_fields)}"
            return _problem(where, problem["input"], message)
        return {k: problem[k] for k in ("type", "loc", "input", "ctx") if k in problem}

    @property
    def given(self) -> list[str]:
        """The names set in the YAML, in documented order."""
        return [name for name in type(self).model_fields if name in self.model_fields_set]

    def values(self, leave_out: Iterable[str] = ()) -> dict[str, Any]:
        """Returns the values set in the YAML as Python values, by name."""
        return {n: _python(getattr(self, n)) for n in self.given if n not in leave_out}

    def make(self) -> Any:
        """Makes the Python value."""
        assert self.target is not None
        return type(self).target(**self.values())  # pyright: ignore[reportOptionalCall]


class Choice(Part):
    """A YAML mapping with exactly one of several names."""

    choices: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[tuple[str, ...]] = ()
    """Choices without required settings, which may be written as the name only."""

    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        if isinstance(value, str) and value in cls.alone:
            return {value: {}}
        if not isinstance(value, dict):
            raise ValueError(f"expected one of {', '.join(cls.choices)}, got {value!r}")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        own = handler(core_schema)
        return {"anyOf": [own, {"enum": list(cls.alone)}]} if cls.alone else own

    @model_validator(mode="after")
    def _exactly_one(self) -> Choice:
        given = [name for name in self.choices if name in self.model_fields_set]
        if len(given) != 1:
            raise ValueError(
                f"expected one of {', '.join(self.choices)}, got {' and '.join(given) or 'none'}"
            )
        return self

    @property
    def chosen(self) -> str:
        """The chosen name."""
        return next(name for name in self.choices if name in self.model_fields_set)

    def make(self) -> Any:
        return getattr(self, self.chosen).make()


def _problem(where: tuple[Any, ...], given: Any, message: str) -> Any:
    return {"type": "value_error", "loc": where, "input": given, "ctx": {"error": ValueError(message)}}


def _python(value: Any) -> Any:
    if isinstance(value, Part):
        return value.make()
    return tuple(_python(v) for v in value) if isinstance(value, list) else value


def choice(name: str, doc: str, of: Mapping[str, type[Part]], /, **more: Any) -> type[Choice]:
    """Makes a model with one of ``of``; ``more``: other fields, as for pydantic's create_model."""
    fields: dict[str, Any] = {n: setting(p) for n, p in of.items()}
    with warnings.catch_warnings():  # pydantic's own BaseModel.json is deprecated, ours is a field
        warnings.filterwarnings("ignore", 'Field name "json"')
        made = create_model(name, __base__=Choice, __doc__=doc, **(more | fields))
    made.choices = tuple(of)
    made.alone = tuple(
        n for n, p in of.items() if not any(f.is_required() for f in p.model_fields.values())
    )
    return made


def part(
    name: str,
    targets: Sequence[Callable[..., Any]],
    leave_out: Iterable[str] = (),
    types: Mapping[Any, Any] = {},
    **more: Any,
) -> type[Part]:
    """Makes a model with the parameters of classes or functions; the first definition of a name wins.

    Args:
        leave_out: parameters that the YAML does not have.
        types: YAML types for Python types, also inside unions.
        more: other fields, or other types, as for pydantic's create_model.
    """
    fields: dict[str, Any] = {}
    kind: Any
    for target in targets:
        # Of a class that is no dataclass, its __init__ has the annotations.
        plain = isinstance(target, type) and not is_dataclass(target)
        known = get_type_hints(target.__init__ if plain else target)
        for parameter in inspect.signature(target).parameters.values():
            left_out = parameter.name in {"self", *leave_out, *more}
            if left_out or parameter.kind is parameter.VAR_KEYWORD:
                continue
            required = parameter.default is parameter.empty
            kind = _yaml_type(known.get(parameter.name, parameter.annotation), types)
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind, required = Texts, True
            about = described(target, parameter.name)
            field = (kind, Field(description=about)) if required else setting(kind, about)
            fields.setdefault(parameter.name, field)
    doc = inspect.getdoc(targets[0])
    with warnings.catch_warnings():  # pydantic's own BaseModel.schema is deprecated, ours is a field
        warnings.filterwarnings("ignore", 'Field name "schema"')
        made = create_model(name, __base__=Part, __doc__=doc, **(more | fields))
    made.target = targets[0]
    return made


def _yaml_type(hint: Any, types: Mapping[Any, Any]) -> Any:
    """Returns the YAML type of a parameter; for a union, the first member with a YAML type, or a list
    and a single value if Python takes both."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = next((m for m in members if m in (str, bool)), None)
    if plain is not None and Sequence[str] in members:
        return list[str] | plain
    known = {timedelta: DurationText, Sequence[str]: Texts, tuple[str, ...]: Texts, **types}
    for member in members:
        if member in known:
            return known[member]
    if {str, float} <= {*members}:
        return Number | str
    numbers: dict[Any, Any] = {int: Whole, float: Number}
    for member in members:
        if member in numbers:
            return numbers[member]
        if member is bool or get_origin(member) is Literal:
            return _or_template(member)
        if member in (str, dict[str, Any]):
            return member
        of_texts = get_origin(member) is Mapping and get_args(member)[0] is str
        if of_texts or member == dict[str, str]:
            return TextsByName
    raise TypeError(f"the YAML has no type for {hint}; add one to types or more")


def described(target: Any, name: str) -> str | None:
    """Returns the text of a parameter in the ``Args:`` of a docstring."""
    kinds = target.__mro__ if isinstance(target, type) else (target,)
    doc = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in kinds)
    found = re.search(rf"^ {{4}}(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return re.sub(r"\s+", " ", found.group(1)) if found else None


# Columns in YAML


_TYPES: dict[str, type[T.DataType]] = {
    "string": T.StringType,
    "boolean": T.BooleanType,
    "byte": T.ByteType,
    "tinyint": T.ByteType,
    "short": T.ShortType,
    "smallint": T.ShortType,
    "int": T.IntegerType,
    "integer": T.IntegerType,
    "long": T.LongType,
    "bigint": T.LongType,
    "float": T.FloatType,
    "double": T.DoubleType,
    "date": T.DateType,
    "timestamp": T.TimestampType,
    "binary": T.BinaryType,
}
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_ARRAY = re.compile(r"array<(.+)>")

CHECKS = (
    *("eq", "ne", "gt", "ge", "lt", "le", "in_range", "isin", "notin"),
    *("str_contains", "str_startswith", "str_endswith"),
)
"""The pandera checks for PySpark, by their names in ``pandera.pyspark.Field``."""
_OF_LISTS = ("in_range", "isin", "notin")


def _typed(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


_CHECKS: dict[str, Any] = {c: (optional(list[Any]) if c in _OF_LISTS else Any, None) for c in CHECKS}
_Settings = create_model(
    "Column",
    __base__=Part,
    __doc__="A column: its type as text, or its type and checks of its values.",
    type=(str, Field(description=f"A Spark type: {', '.join(_TYPES)}, decimal(p,s), array<…>")),
    nullable=(Boolean, Field(default=False, description="Whether the column may be null.")),
    description=setting(str, "Shown in Dagster."),
    **_CHECKS,
)
Column = Annotated[_Settings, BeforeValidator(_typed, json_schema_input_type=str | _Settings)]


def spark_type(name: str, column: str, text: str) -> T.DataType:
    """Parses a Spark type without a Spark session.

    Raises:
        TopologyError: an unknown type.
    """
    plain = text.strip().lower()
    if plain in _TYPES:
        return _TYPES[plain]()
    if found := _DECIMAL.fullmatch(plain):
        precision, scale = int(found[1]), int(found[2])
        if not max(1, scale) <= precision <= 38:
            raise TopologyError(
                f"{name}: column {column!r} has the type {text!r}; expected decimal(p,s) with 1 to 38 "
                "digits, of which at most p are after the point; correct it"
            )
        return T.DecimalType(precision, scale)
    if found := _ARRAY.fullmatch(plain):
        return T.ArrayType(spark_type(name, column, found[1]))
    raise TopologyError(
        f"{name}: column {column!r} has the type {text!r}; expected {', '.join(_TYPES)}, decimal(p,s) "
        "or array<type>; for structs and maps write a pandera model and set schema to its Python path"
    )


def contract(name: str, columns: Mapping[str, Part]) -> type[pa.DataFrameModel]:
    """Makes a pandera model of columns, as a Python user would write it.

    Args:
        columns: a ``Column`` for each name.
    """
    annotations: dict[str, Any] = {}
    members: dict[str, Any] = {"__annotations__": annotations, "__module__": __name__}
    for number, (column, about) in enumerate(columns.items()):
        given = about.values()
        kind = spark_type(name, column, given.pop("type"))
        given |= {check: list(given[check]) for check in ("isin", "notin") if check in given}
        plain = type(kind) in _TYPES.values()
        annotations[f"column_{number}"] = type(kind) if plain else kind
        try:
            members[f"column_{number}"] = pa.Field(alias=column, **given)
        except (TypeError, ValueError) as error:
            raise TopologyError(
                f"{name}: expected checks of the column {column!r} that pandera takes, got: {error}; "
                "correct them"
            ) from None
    return type(name, (pa.DataFrameModel,), members)


# Entries: streams, tables, joins and sensors


_SHOWN = ("name", "description", "group", "owners", "key_prefix", "freshness", "log_retention")


_SHARED_TYPES: dict[Any, Any] = {
    Materialized: part("Materialized", [Materialized]),
    Mapping[str, Unit]: Unit | dict[str, Unit],
}
"""YAML types of the parameters of many kinds of entries."""


def _part(
    name: str, *targets: Callable[..., Any], types: Mapping[Any, Any] = {}, **more: Any
) -> type[Part]:
    leave_out = (*_SHOWN, "other", "table", "others", "operator", "contract")
    return part(name, targets, leave_out, {**_SHARED_TYPES, **types}, **more)


_plain_formats = {
    "json": _part("Json", Json),
    "avro": _part("Avro", Avro, types={SchemaRegistry: _part("SchemaRegistry", SchemaRegistry)}),
}
_event = choice("Event", "How the bytes of a change event are read.", _plain_formats)
_format = choice(
    "Format",
    "How the bytes of a message are read.",
    {
        **_plain_formats,
        "raw": _part("Raw", Raw),
        "protobuf": _part("Protobuf", Protobuf),
        "debezium": _part("Debezium", Debezium, types={Json: _event}),
    },
)
_kafka_types = {KafkaCluster: _part("Cluster", KafkaCluster), Format: _format}
_TOPICS_START = setting(
    Annotated[
        datetime | str | dict[str, dict[Whole, Whole]],
        BeforeValidator(
            _time_or("earliest", "latest"), json_schema_input_type=str | dict[str, dict[str, int]]
        ),
    ],
    described(KafkaSource, "start"),
)
_START = setting(Whole | str, "current, earliest, or a version to start from.")
_states = {
    "delta": _part("Delta", DeltaSource, start=_START),
    "snapshots": _part("Snapshots", SnapshotSource),
}
_named = {
    "as_type": "the class to load from its IO manager, for example polars.DataFrame",
    "partitions_def": "a Dagster partitions definition for this asset",
    "partition_mapping": "a Dagster partition mapping: which of its partitions a run reads",
}
"""Settings of a source whose values are Python objects, given in YAML by their paths."""
_source = choice(
    "Source",
    "Where records come from.",
    {
        "files": _part("Files", FilesSource),
        "kafka": _part("Kafka", KafkaSource, types=_kafka_types, start=_TOPICS_START),
        **_states,
        "asset": _part(
            "UpstreamAsset",
            AssetSource,
            types={Mapping[str, Any]: dict[str, Any]},
            key=(str, Field(description="Key of the upstream asset, its parts joined by slashes.")),
            **{name: setting(str, f"Python path: {what}.") for name, what in _named.items()},
        ),
    },
)
_whole = choice(
    "Snapshot",
    "A snapshot with the initial rows.",
    {name: _states[name] for name in ("snapshots", "delta")},
)
_sensor = part("Sensor", [build_sensor], ["node", "target", "resource_prefix"])


_SIZE = (_duration_or(*CALENDAR_SIZES), Field(description=described(TumblingWindow, "size")))
_window = choice(
    "Window",
    "The windows of the aggregate.",
    {
        "tumbling": _part("Tumbling", TumblingWindow, size=_SIZE),
        "hopping": _part("Hopping", HoppingWindow),
        "session": _part("Session", SessionWindow),
        "sliding": _part("Sliding", SlidingWindow),
    },
)
_until = choice(
    "Until",
    "How long updates are buffered.",
    {
        "time_limit": _part("TimeLimit", UntilTimeLimit),
        "window_closes": _part("WindowCloses", UntilWindowCloses),
    },
)


_AS_KNOWN = setting(
    _duration_or("now", "when_recorded"),
    "Which versions of a versioned table can match: now, when_recorded, or a duration like 1d: those "
    "recorded no later than that after the record's timestamp.",
)

_NODE: Any = (
    str,
    Field(description="An asset of this file, or the Python path of one: my.module.name."),
)


@dataclass(frozen=True)
class Concept:
    """A kind of entry: its YAML model, and the function that makes the stream or table."""

    yaml: type[Part]
    inputs: tuple[str, ...]
    make: Callable[[str, dict[str, Any], dict[str, Stream], dict[str, Any]], Stream]
    """``(name, values, inputs, shown) -> result``."""


def _source_concept(title: str, kind: type[Stream]) -> Concept:
    """Makes the kind of entry for a stream or table with a source."""
    yaml = _part(
        title,
        kind,
        types={datetime: _text_as(datetime, _time_or("initial_load")), Source: _whole},
        schema=setting(str, "Python path of a pandera model."),
        columns=setting(dict[str, Column], "Instead of schema."),
        source=(_source, Field(description="Where its records come from.")),
        sensor=setting(_sensor, "Settings of its sensor."),
    )

    def make(name: str, values: dict[str, Any], _: Any, shown: dict[str, Any]) -> Stream:
        columns, schema = values.pop("columns", None), values.pop("schema", None)
        if (columns is None) == (schema is None):
            raise TopologyError(
                f"{name}: expected either columns or schema, got {'both' if columns else 'neither'}; "
                "list the columns as name: type, or set schema to a pandera model: "
                "my_project.schemas.Price"
            )
        return kind(name, schema=schema or contract(name, columns), **values, **shown)

    return Concept(yaml, (), make)


def _bound(name: str) -> Any:
    where = "-5m ends the window before it" if name == "after" else "-5m starts the window after it"
    about = f"Join of two streams: how far {name} a left record its matches may lie; {where}."
    return setting(SignedDurationText, about)


def _method_concept(title: str, method: str, *kinds: type[Stream]) -> Concept:
    """Makes the kind of entry for a method: inputs ``left`` and ``right`` for joins, else ``input``."""
    targets = [getattr(kind, method) for kind in kinds]
    joins = {"other", "others"} & set(inspect.signature(targets[0]).parameters)
    inputs = ("left", "right") if joins else ("input",)
    more: dict[str, Any] = dict.fromkeys(inputs, _NODE)
    if method == "suppress":
        more["until"] = (_until, ...)
    if "as_known" in inspect.signature(targets[0]).parameters:
        more["as_known"] = _AS_KNOWN
    if "within" in inspect.signature(targets[0]).parameters:
        more |= {name: _bound(name) for name in ("before", "after")}

    def make(
        name: str, values: dict[str, Any], nodes: dict[str, Stream], shown: dict[str, Any]
    ) -> Stream:
        first, *others = (nodes[role] for role in inputs)
        called = getattr(first, method, None)
        if called is None:
            raise TopologyError(
                f"{name}: {method} needs a {' or a '.join(k.__name__ for k in kinds)}, got the "
                f"{type(first).__name__} {first.name!r}; convert a stream with to_table"
            )
        _refuse_foreign(name, method, called, values, first)
        takes = inspect.signature(called).parameters
        spread = [n for n, p in takes.items() if p.kind is p.VAR_POSITIONAL]
        others += [item for n in spread for item in values.pop(n, ())]
        return called(*others, name=name, **values, **shown)

    return Concept(_part(title, *targets, **more), inputs, make)


def _aggregate(
    name: str, values: dict[str, Any], nodes: dict[str, Stream], shown: dict[str, Any]
) -> Stream:
    node, window = nodes["input"], values.pop("window", None)
    about = {n: values.pop(n) for n in ("partitions", "partition_by") if n in values}
    grouped = node.group_by(*values.pop("group_by", ()), **about)
    if isinstance(grouped, GroupedTable):
        if window is not None:
            raise TopologyError(
                f"{name}: window needs a stream, but {node.name!r} is a table; remove window, or "
                "convert the table with to_stream"
            )
        return grouped.aggregate(name=name, **values, **shown)
    made = grouped if window is None else grouped.windowed_by(window)
    _refuse_foreign(name, "aggregate", made.aggregate, values, node)
    return made.aggregate(name=name, **values, **shown)


def _refuse_foreign(
    name: str, method: str, called: Callable[..., Any], values: dict[str, Any], node: Stream
) -> None:
    """Raises TopologyError for settings that only another kind of input has."""
    foreign = [n for n in values if n not in inspect.signature(called).parameters]
    if foreign:
        raise TopologyError(
            f"{name}: the {method} of a {type(node).__name__}, here {node.name!r}, has no "
            f"{' and no '.join(foreign)}; remove it"
        )


_AGGREGATE = part(
    "Aggregate",
    [GroupedTable.aggregate, GroupedStream.aggregate, WindowedStream.aggregate],
    (*_SHOWN, "select"),
    _SHARED_TYPES,
    input=_NODE,
    group_by=setting(Texts, "column, or expression as name."),
    window=setting(_window, "Windows, for a stream only."),
    aggregates=(
        dict[str, str],
        Field(description="By name: count(*), sum(x), avg(x), min(x), max(x)."),
    ),
    partitions=setting(Whole),
    partition_by=setting(str),
)

CONCEPTS: dict[str, Concept] = {
    "stream": _source_concept("Stream", Stream),
    "table": _source_concept("Table", Table),
    "versioned_table": _source_concept("VersionedTable", VersionedTable),
    "join": _method_concept("Join", "join", Stream, Table),
    "left_join": _method_concept("LeftJoin", "left_join", Stream, Table),
    "outer_join": _method_concept("OuterJoin", "outer_join", Stream, Table),
    "filter": _method_concept("Filter", "filter", Table),
    "filter_not": _method_concept("FilterNot", "filter_not", Table),
    "map_values": _method_concept("MapValues", "map_values", Table),
    "flat_map_values": _method_concept("FlatMapValues", "flat_map_values", Stream),
    "select_key": _method_concept("SelectKey", "select_key", Stream),
    "merge": _method_concept("Merge", "merge", Stream),
    "aggregate": Concept(_AGGREGATE, ("input",), _aggregate),
    "suppress": _method_concept("Suppress", "suppress", Table),
    "to_table": _method_concept("ToTable", "to_table", Stream),
    "to_stream": _method_concept("ToStream", "to_stream", Table),
}

AssetPart: type[Choice] = choice(
    "Asset",
    "A stream or table: its name, how Dagster shows it, and exactly one source or operator.",
    {name: concept.yaml for name, concept in CONCEPTS.items()},
    name=(str, ...),
    description=setting(str),
    group=setting(str),
    owners=setting(Texts),
    key_prefix=setting(PathText),
    freshness=setting(
        _duration_or("every_run", "on_growth"),
        "How far a table's view may lag behind its log: on_growth, every_run, or 1h.",
    ),
    log_retention=setting(DurationText, "How long maintenance keeps batches of the log, like 90d."),
)


def make_asset(
    entry: Choice, inputs: Mapping[str, Stream], found: Callable[[str, str], Any]
) -> tuple[Stream, dict[str, Any]]:
    """Makes the stream or table of an entry, and the options of its sensor.

    Args:
        inputs: its inputs, by role.
        found: imports the object that a setting names by a Python path.
    """
    given: Any = entry
    concept, about = CONCEPTS[entry.chosen], getattr(entry, entry.chosen)
    columns, sensor = (getattr(about, name, None) for name in ("columns", "sensor"))
    values = about.values(leave_out=(*concept.inputs, "columns", "sensor"))
    if columns is not None:
        values["columns"] = columns
    if values.get("schema") is not None:
        values["schema"] = found("schema", values["schema"])
    if isinstance(source := values.get("source"), AssetSource):
        named = {n: path for n in _named if (path := getattr(source, n)) is not None}
        values["source"] = replace(source, **{n: found(n, path) for n, path in named.items()})
    shown = {n: v for n in _SHOWN[1:] if (v := getattr(given, n)) is not None}
    node = concept.make(given.name, values, dict(inputs), shown)
    if sensor is not None and not has_sensor(node):
        raise TopologyError(
            f"{node.name}: expected no sensor, since Dagster tracks the upstream asset itself, got "
            "one; remove it, and set an automation_condition under post_processing"
        )
    return node, {} if sensor is None else sensor.values()


# Topology component


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


_ALERTS = part(
    "Alerts",
    [build_alerts],
    ["nodes", "severity", "pool", "resource_prefix"],
    assets=setting(Texts, "Names of assets of this file; without it, all of them."),
    to=(str, Field(description="The function that sends an Alert, my_project.alerts:send.")),
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
    catalog: optional(str) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None,
        description="A schema of Spark's catalog, such as lake.bronze, in which each run registers its "
        "tables by name; only together with warehouse.",
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
    alerts: optional(list[_ALERTS]) = Field(  # pyright: ignore[reportInvalidTypeForm]
        default=None,
        description="Limits on assets, as asset checks, and a sensor that sends each breach once.",
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
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> TopologyComponent:
        """Renders templates, which Dagster leaves to the component, and validates the result."""
        # As Dagster does for the components that it renders itself.
        project = SimpleNamespace(project_root=str(context.project_root.resolve()))
        scope = context.resolution_context.with_scope(context=project)
        here = scope.at_path("attributes")
        # Without warnings: a template is a text where a number may be expected.
        made = attributes or TopologyAttributes(assets=[])
        given = made.model_dump(exclude_unset=True, warnings=False)
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
            resources = self._resources(self.attributes.warehouse)
        for name in ("catalog", "spark"):
            if resources is None and getattr(self.attributes, name) is not None:
                said = (
                    "expected warehouse in the same file, got none; add warehouse, or remove "
                    f"{name} and set it in the project's build_resources"
                )
                raise DefinitionsError(_placed(self._position, (name,), said))
        if self.attributes.catalog is not None:
            require_names(nodes.values())
        made = dg.Definitions(
            sensors=[
                builder.partition_sensor(number, about)
                for number, about in enumerate(self.attributes.partition_sensors or ())
            ],
            resources=resources,
        )
        more = [builder.definitions(name, node) for name, node in nodes.items()]
        more += [
            builder.alerts(number, about) for number, about in enumerate(self.attributes.alerts or ())
        ]
        if self.attributes.maintenance is not None:
            more.append(build_maintenance(*nodes.values(), **self.attributes.maintenance.values()))
        return dg.Definitions.merge(made, *more)

    def _resources(self, path: str) -> dict[str, Any]:
        spark, place = self.attributes.spark, "warehouse"
        try:
            warehouse_at(path)
            place = "catalog"
            warehouse = warehouse_at(path, self.attributes.catalog)
            place = "spark"
            if spark is None:
                return build_resources(warehouse)
            settings = json.dumps(spark.values(), sort_keys=True, default=str)
            return build_resources(warehouse, _session(settings))
        except VtDagsterError as error:
            raise DefinitionsError(_placed(self._position, (place,), str(error))) from None


@cache
def _session(settings: str) -> SparkResource:
    """Returns one resource for all files with equal settings: Dagster merges only identical objects."""
    return SparkResource(**json.loads(settings))


class _Unset(Undefined):
    """A name or environment variable that is not set. Within a text, Dagster would leave it out, or
    write None; a default, or a condition, takes it as not set."""

    __iter__ = __str__ = __len__ = Undefined._fail_with_undefined_error  # pyright: ignore


class _Variables:
    """The environment variables of templates, ``env.NAME`` or ``env('NAME', 'default')``."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __call__(self, *arguments: Any) -> Any:
        return self._env(*arguments)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        return _Unset(name=f"{_ENV}{name}") if found is None else found


_ENV = "env."
_JINJA = NativeEnvironment(undefined=_Unset)


def _rendered(value: Any, context: dg.ResolutionContext) -> Any:
    """Renders templates only: Dagster would evaluate SQL texts like ``'x'`` as Python values."""
    if isinstance(value, dict):
        return {k: _rendered(v, context.at_path(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_rendered(v, context.at_path(i)) for i, v in enumerate(value)]
    if not is_template(value):
        return value
    try:
        found = _JINJA.from_string(value).render(
            {**context.scope, "env": _Variables(context.scope["env"])}
        )
        unset = found._undefined_name if isinstance(found, _Unset) else None
    except UndefinedError as error:
        found, unset = None, str(error).strip("'")
    except Exception:
        return context.resolve_value(value)  # fails with Dagster's own message
    if unset is not None and not unset.startswith(_ENV):
        context.resolve_value(value)  # which may fail too
        said = f"expected names in {value} among {', '.join(sorted(context.scope))}; correct it"
        raise DefinitionsError(_placed(context, (), said))
    if found is None or unset is not None:
        said = f"expected a value of {value}, got none; set the environment variable, or a value"
        raise DefinitionsError(_placed(context, (), said))
    return found


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

    def definitions(self, name: str, node: Stream) -> dg.Definitions:
        """Makes the asset of an entry, its checks, and its sensor if its source has one."""
        entry, path = self.entries[name], self._paths[name]
        try:
            return dg.Definitions(
                assets=[build_asset(node)],
                asset_checks=[build_checks(node)],
                sensors=[build_sensor(node, **self.sensors[name])] if has_sensor(node) else [],
            )
        except VtDagsterError as error:
            place = self._nearest(path, vars(entry)[entry.chosen], str(error))
            raise self._error(place, str(error)) from None
        except dg.DagsterInvalidDefinitionError as error:
            raise self._error(path[:2], f"{name}: {error}; correct it") from None

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

    def alerts(self, number: int, about: Part) -> dg.Definitions:
        """Makes the checks and the sensor of an entry of ``alerts``."""
        place, values = ("alerts", number), about.values()
        names = values.pop("assets", None) or [*self.entries]
        nodes = [self._input((*place, "assets"), name) for name in names]
        try:
            # A colon separates the function from its module, as in entry points.
            to = self._imported("to", values.pop("to").replace(":", "."))
        except VtDagsterError as error:
            raise self._error((*place, "to"), str(error)) from None
        try:
            return build_alerts(nodes, to=to, **values)
        except VtDagsterError as error:
            raise self._error(place, str(error)) from None

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
                f"{setting}: expected the Python path of an object, like my_project.schemas.Price, got "
                f"{path!r}: {error}"
            ) from None

    def _nearest(self, path: tuple[Any, ...], about: Part, message: str) -> tuple[Any, ...]:
        """Returns the path of the setting that a message names first, or that of the entry."""
        if re.search(r"(?<![\w.])key[_ ]prefix(?![\w.])", message):  # of the entry itself
            return (*path[:-1], "key_prefix")
        matches = [
            (re.search(rf"(?<![\w.]){words}(?![\w.])", message), p) for p, words in _settings(about)
        ]
        found = [(match.start(), place) for match, place in matches if match is not None]
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
