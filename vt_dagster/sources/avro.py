"""Avro records as columns: fields match by name at any depth; each value is exact or null."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructType,
)

from vt_dagster.errors import SourceError
from vt_dagster.sources.value_reader import (
    FLOATS,
    INTEGERS,
    NAMED_UNITS,
    NO_MOMENT,
    TIMES,
    VARIABLE_DECIMAL,
    Reading,
    any_of,
    in_other_case,
    map_of,
    of_boolean,
    of_bytes,
    of_decimal,
    of_double,
    of_long,
    of_text,
    of_unscaled,
    other_case,
    text_of_unscaled,
)
from vt_dagster.topology.schema import was

READ = "_vt_read"
"""Field of a row: true if the message is a row, false if it is null, null if it is unreadable."""
COUNTS_IF = "_vt_counts_if"
"""Metadata of a column: the name and the text of the other field with which a value that does not fit
makes the record unreadable. Otherwise it is null."""
NO_SCHEMA = '"null"'
"""Stands for a newest schema that is not known."""
_ROW, _END = "_vt_row", "_vt_end"
_MARK = uuid4().bytes
"""What follows a message: 16 bytes that no message ends with."""
_UNITS = {
    ("int", "date"): "days",
    ("int", "time-millis"): NO_MOMENT,
    ("long", "time-micros"): NO_MOMENT,
    **{
        ("long", f"{local}timestamp-{unit}"): unit
        for local in ("", "local-")
        for unit in ("millis", "micros", "nanos")
    },
}
"""Units by type and logical type."""
_MOST_DIGITS = 38
"""Maximum digits of a DECIMAL in Spark. Kafka Connect's converter declares 64, unless the connector
declares less."""
_NUMBERS = (*INTEGERS, *FLOATS, DecimalType, StringType)
_FITTING = {
    **dict.fromkeys(("int", "long", "float", "double", "decimal", "unscaled", "variable"), _NUMBERS),
    "boolean": (BooleanType, StringType),
    **dict.fromkeys(("bytes", "fixed", "enum"), (BinaryType, StringType)),
    "encoded": (BinaryType,),
}
"""Column types that values of an Avro type may fit into; a string may fit into any."""
_ENCODED = ("big-decimal", "duration", "uuid")
"""Logical types whose bytes are no text."""
_PRIMITIVES = ("string", "null", "int", "long", "float", "double", "boolean", "bytes")
_RECORDS = ("record", "variable")
_DEEP = ("record", "recursive", "array", "map")
_MEMBER = re.compile(r"member\d+")


class Node(NamedTuple):
    """A type in an Avro schema.

    Args:
        type: the Avro type: ``record``, ``long``, …; ``decimal`` for that logical type; ``unscaled``
            for one of more digits than Spark reads; ``variable`` for Debezium's record of a decimal and
            its scale; ``encoded`` for bytes of another logical type; ``recursive`` for a record in
            itself, which Spark cannot read.
        spark: the type for Spark, which finds fields by name whatever their case, converts times with
            overflow, and reads the members of some unions as one type. The encoding has no names: types
            and fields have other ones here, no logical type but decimals, and a member of a union with
            several is a record with one field, which is encoded as the field.
        fields: the fields of a record.
        items: the element type of an array, or the value type of a map.
        members: the members of a union, without null.
        unit: the unit of a number that is a time.
        scale: the digits after the point of an ``unscaled`` number.
        aliases, default: those of the field that has the type.
        name: the full name of a named type.
    """

    type: str
    spark: Any
    fields: Mapping[str, Node] = {}
    items: Node | None = None
    members: Sequence[Node] = ()
    unit: str | None = None
    scale: int = 0
    aliases: Sequence[str] = ()
    default: Any = None
    name: str = ""

    @property
    def unread(self) -> bool:
        """Whether Spark drops the fields of the type."""
        return self.type == "recursive" or (self.items is not None and self.items.unread)

    def part(self, value: Column, field: str) -> Column:
        """Returns a field of a value of the type."""
        return value[_field_at([*self.fields].index(field))]


_NO_NODE, _TEXT = Node("null", "null"), Node("string", "string")


def _field_at(place: int) -> str:
    """Returns the name of a field for Spark."""
    return f"_{place}"


@cache
def node_of(schema: str) -> Node:
    """Returns the root type of a schema.

    Raises:
        SourceError: the text is no schema.
    """
    with _of_avro(schema):
        parser, whole = _Parser(), json.loads(schema)
        parser.define(whole, "")
        return parser.node(whole, "", ())


@contextmanager
def _of_avro(schema: str) -> Iterator[None]:
    """Raises SourceError in place of the errors of a text that is no schema."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__} {error}"
        raise SourceError(
            f"Avro: expected an Avro schema, got {schema[:200]!r}: {why}; correct it"
        ) from None


class _Parser:
    """Resolves the names of a schema as the specification says, and as Avro's library for Java does: a
    type may be defined after its use, and again in the same way."""

    def __init__(self) -> None:
        self.known = dict[str, tuple[Any, str]]()
        """The named types by full name, each with the namespace of the names in it."""
        self.numbers = count()
        self._plain = dict[str, Any]()
        """What must be equal in two definitions of a type."""
        self._own = dict[str, str]()
        """Names for Spark of the types so far, by full name. A later use has only the name."""
        self._later = dict[str, Node]()
        """Types for later uses, except those with a type that was around the first one."""
        self._cuts = 0

    def define(self, schema: Any, space: str) -> Any:
        """Collects the named types in a schema; returns it with their full names in their place."""
        if isinstance(schema, list):
            return [self.define(one, space) for one in schema]
        if isinstance(schema, str):
            return schema if schema in _PRIMITIVES else _full(schema, space)
        kind = schema["type"]
        found = {k: v for k, v in schema.items() if k not in ("doc", "aliases", "namespace")}
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            return found | {part: self.define(schema[part], space)}
        if kind not in _NAMED:
            whole = self.define(kind, space)
            return whole if len(found) == 1 else found | {"type": whole}
        name, space = _named(schema, space)
        if kind in _WITH_FIELDS:
            fields = [{**one, "type": self.define(one["type"], space)} for one in schema["fields"]]
            found["fields"] = [
                {"order": "ascending"} | {k: v for k, v in one.items() if k not in ("doc", "aliases")}
                for one in fields
            ]
        self.known.setdefault(name, (schema, space))
        if self._plain.setdefault(name, found | {"name": name}) != found | {"name": name}:
            raise ValueError(f"the type {name!r} has two definitions that differ")
        return name

    def node(self, schema: Any, space: str, inside: Sequence[str]) -> Node:
        """Returns a type.

        Args:
            space: the namespace of its names.
            inside: the full names of the types around it.

        Raises:
            ValueError: the schema is wrong.
        """
        if isinstance(schema, list):
            return self._union([self.node(one, space, inside) for one in schema])
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return Node(schema, schema)
            names = (_full(schema, space), schema)
            name = next((n for some in (self._own, self.known) for n in names if n in some), None)
            if name is None:
                raise ValueError(f"the type {schema!r} is not defined")
            schema, space = self.known[name]
        kind = schema["type"]
        if not isinstance(kind, str) or kind not in (*_PRIMITIVES, *_NAMED, "array", "map"):
            return self.node(kind, space, inside)
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            items = self.node(schema[part], space, inside)
            return Node(kind, {"type": kind, part: items.spark}, items=items)
        if kind not in _NAMED:
            return _leaf_of(schema, kind)
        name, space = _named(schema, space)
        if name in inside:
            self._cuts += 1
            return Node("recursive", self._own[name])
        if name in self._later:
            return self._later[name]
        is_first, cuts = name not in self._own, self._cuts
        own = self._own.setdefault(name, f"T{next(self.numbers)}")
        node = self._defined(schema, own, space, (*inside, name))._replace(name=name)
        later = node._replace(spark=own)
        if cuts == self._cuts:
            self._later[name] = later
        return node if is_first else later

    def _defined(self, schema: Any, own: str, space: str, inside: Sequence[str]) -> Node:
        """Returns a named type, the last one in ``inside``."""
        kind = schema["type"]
        if kind == "enum":
            return Node(kind, {"type": kind, "name": own, "symbols": _names(schema["symbols"])})
        if kind == "fixed":
            return _leaf_of(schema, {"type": kind, "name": own, "size": schema["size"]})
        names = _names([one["name"] for one in schema["fields"]])
        types = [self._field(one, space, inside) for one in schema["fields"]]
        is_number = inside[-1] == VARIABLE_DECIMAL and {*names} == {"scale", "value"}
        fields = dict(zip(names, types, strict=True))
        return Node("variable" if is_number else "record", _record(own, *types), fields)

    def _field(self, field: Any, space: str, inside: Sequence[str]) -> Node:
        more = {"aliases": field.get("aliases", ()), "default": field.get("default")}
        return self.node(field["type"], space, inside)._replace(**more)

    def _union(self, parts: Sequence[Node]) -> Node:
        members = [one for one in parts if one.type != "null"]
        if len(parts) > len(members) + 1 or any(isinstance(one.spark, list) for one in parts):
            raise ValueError("a union has another one, or null twice")
        if not members:
            return Node("null", [one.spark for one in parts])
        if len(members) == 1:
            return members[0]._replace(spark=[one.spark for one in parts])

        def plain(one: Node) -> Any:
            return "null" if one.type == "null" else _record(f"T{next(self.numbers)}", one)

        return Node("union", [plain(one) for one in parts], members=members)


_WITH_FIELDS = ("record", "error")
_NAMED = (*_WITH_FIELDS, "enum", "fixed")


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _named(schema: Mapping[str, Any], space: str) -> tuple[str, str]:
    """Returns the full name of a type in a namespace, and the namespace of the names in it."""
    (short,) = _names([schema["name"].rpartition(".")[2]])
    own = schema.get("namespace")
    space = schema["name"].rpartition(".")[0] or (space if own is None else own)
    return _full(short, space), space


def _names(names: Sequence[str]) -> Sequence[str]:
    """Returns names.

    Raises:
        ValueError: one of them is no name, or is there twice.
    """
    for name, times in Counter(names).items():
        if not name.isidentifier():
            raise ValueError(f"the name {name!r} is not of letters, digits and _")
        if times > 1:
            raise ValueError(f"the name {name!r} is there twice")
    return names


def _record(name: str, *types: Node) -> Any:
    fields = [{"name": _field_at(i), "type": one.spark} for i, one in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields}


def _leaf_of(schema: Mapping[str, Any], spark: Any) -> Node:
    """Returns a type without parts. A logical type that does not fit it is ignored."""
    kind, logical = schema["type"], schema.get("logicalType", "")
    if kind not in ("bytes", "fixed"):
        of_connect = NAMED_UNITS.get(schema.get("connect.name", ""))
        return Node(kind, spark, unit=_UNITS.get((kind, logical), of_connect))
    if logical != "decimal":
        # The bytes of such a value may be valid UTF-8 by chance.
        return Node("encoded" if logical in _ENCODED else kind, spark)
    scale, most = schema.get("scale", 0), math.inf
    digits = schema.get("precision", _NO_PRECISION)
    if kind == "fixed" and "precision" in schema:
        most = math.log10(2) * (8 * schema["size"] - 1)
    # The bytes of a wrong decimal are no text either.
    if not type(scale) is type(digits) is int or digits == 0 or not 0 <= scale <= digits <= most:
        return Node("encoded", spark)
    if digits > _MOST_DIGITS:
        return Node("unscaled" if scale <= _MOST_DIGITS else "encoded", spark, scale=scale)
    of_spark = spark if kind == "fixed" else {"type": kind}
    return Node("decimal", {**of_spark, "logicalType": logical, "precision": digits, "scale": scale})


_NO_PRECISION = _MOST_DIGITS + 1
"""Stands for the precision of a decimal without one: it is read as one of too many digits for Spark."""


def with_types(schema: str, types: Mapping[str, str]) -> str:
    """Returns a schema with the types of other schemas, each defined where it is first used.

    Args:
        types: the schemas of types that it names, and that they name. They may define further types.

    Raises:
        SourceError: a text is no schema.
    """
    parser, done = _Parser(), set[str]()
    for text in (*types.values(), schema):
        with _of_avro(text):
            parser.define(json.loads(text), "")

    def whole(part: Any, space: str) -> Any:
        if isinstance(part, list):
            return [whole(one, space) for one in part]
        if isinstance(part, str):
            name = next((n for n in (_full(part, space), part) if n in parser.known), None)
            if name is None or name in done:
                return name or part
            found, space = parser.known[name]
            return whole({**found, "namespace": space}, "")
        if part["type"] in _NAMED:
            name, space = _named(part, space)
            if name in done:
                return name
            done.add(name)
        found = {k: whole(part[k], space) for k in ("type", "items", "values") if k in part}
        if "fields" in part:
            found["fields"] = [{**one, "type": whole(one["type"], space)} for one in part["fields"]]
        return {**part, **found}

    return json.dumps(whole(json.loads(schema), ""))


def read_avro(message: Column, schema: str) -> Column:
    """Returns an Avro message as a struct: ``_ROW`` with all its fields, and the bytes that follow it.

    Spark returns nulls for an unreadable message, but a readable one may also have nulls only. Spark
    also ignores bytes that follow a message: from a message of another schema, for example in
    Confluent's framing, it reads values that nobody wrote. Therefore a mark is appended to the message,
    and to the schema as its last field. If the message does not end where its schema ends, that field
    has other bytes, or null.
    """
    from pyspark.sql.avro.functions import from_avro

    end = {"type": "fixed", "name": _END, "size": len(_MARK)}
    fields = [{"name": _ROW, "type": node_of(schema).spark}, {"name": _END, "type": end}]
    marked = {"type": "record", "name": "_vt_message", "fields": fields}
    # Spark drops the fields of a record that have its type; by default it reads no such record.
    options = {"mode": "PERMISSIVE", "recursiveFieldMaxDepth": "1"}
    return from_avro(F.concat(message, F.lit(_MARK)), json.dumps(marked), options)


def row_of(
    value: Column, schema: str, wanted: StructType, how: Reading, newest: str = NO_SCHEMA
) -> Column:
    """Returns the wanted fields of a result of ``read_avro``, and ``READ``: null if it is unreadable.

    Args:
        newest: the newest schema, with defaults of fields that ``schema`` lacks, and aliases.
    """
    node, latest = node_of(schema), node_of(newest)
    end, value = value[_END], value[_ROW]
    if node.type != "record":
        if len(wanted.fields) != 1:
            raise SourceError(f"Avro: {misfits(schema, wanted, how)[0]}; give another schema")
        only = wanted.fields[0]
        found, misfit = _fitted(value, node, only.dataType, how, (only.name,), latest)
        columns = [found.alias(only.name)]
    else:
        columns, misfit = _columns(value, node, wanted, how, (), latest)
        if newest != NO_SCHEMA and not {*_written(node, wanted, latest)} & node.fields.keys():
            misfit = F.lit(True)  # with a single schema, ``misfits`` fails when definitions load
    read = F.when(value.isNull(), False).when(~misfit, True)
    return F.struct(*columns, F.when(end == F.lit(_MARK), read).alias(READ))


def misfits(schema: str, wanted: StructType, how: Reading) -> list[str]:
    """Returns descriptions of columns that no message of a schema can fill. Does not use Spark."""
    node = node_of(schema)
    if node.type != "record":
        if len(wanted.fields) != 1:
            return [f"the schema is {schema}, expected a record with the fields {wanted.names}"]
        only = wanted.fields[0]
        return list(_never(node, only.dataType, how, (only.name,)))
    if not {*_written(node, wanted)} & node.fields.keys():
        return [f"the schema has the fields {list(node.fields)}, none of the columns {wanted.names}"]
    return list(_never(node, wanted, how, ()))


def _never(node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> Iterator[str]:
    """Yields descriptions of the parts of a type that no value of an Avro type fits into."""
    if node.type in _RECORDS and isinstance(kind, StructType):
        for f, name in zip(kind.fields, _written(node, kind), strict=True):
            if name in node.fields:
                yield from _never(node.fields[name], f.dataType, how, (*path, f.name))
            elif other := other_case(name, node.fields, kind):
                yield in_other_case(".".join((*path, f.name)), other)
    elif node.items is not None and isinstance(kind, ArrayType | MapType):
        inner = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
        if (node.type == "array") == isinstance(kind, ArrayType):
            yield from _never(node.items, inner, how, path)
        else:
            yield _misfit(node, kind, path)
    elif node.type == "union":
        fit = [
            place < len(node.members) and not [*_never(node.members[place], of_member, how, path)]
            for place, of_member in _members(node, kind)
        ]
        if not (all(fit) if _by_member(kind) else any(fit)):
            yield _misfit(node, kind, path)
    elif node.type != "null" and not _may_fit(node, kind, how, path):
        yield _misfit(node, kind, path)


def _may_fit(node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> bool:
    if isinstance(kind, StructType | ArrayType | MapType) or node.type in _DEEP:
        return False
    if node.type in ("int", "long") and isinstance(kind, TIMES):
        return (node.unit or how.unit(path)) not in (None, NO_MOMENT)
    return isinstance(kind, _FITTING.get(node.type, (DataType,)))


_NAMES = {**dict.fromkeys(("unscaled", "variable"), "decimal"), "encoded": "bytes of a logical type"}


def _misfit(node: Node, kind: DataType, path: Sequence[str]) -> str:
    more = ""
    if node.type in ("int", "long") and isinstance(kind, TIMES):
        more = " (no logical type gives its unit: set it with timestamps)"
        more = " (its type is a time of day, a year or a duration)" if node.unit == NO_MOMENT else more
    name = " or ".join(one.type for one in node.members) or _NAMES.get(node.type, node.type)
    return f"{'.'.join(path)} is {name} in the schema, expected {kind.simpleString()}{more}"


def _fitted(
    value: Column,
    node: Node,
    kind: DataType,
    how: Reading,
    path: tuple[str, ...],
    newest: Node = _NO_NODE,
) -> tuple[Column, Column]:
    """Returns a value as a type, and whether it does not fit (never null).

    Args:
        newest: its type in the newest schema, with defaults and aliases; ``null`` if not known.
    """
    if node.unread or node.type == "null":
        return F.lit(None).cast(kind), F.lit(node.unread)
    if node.type != "union" and newest.members:
        newest = _same_member(newest, node)
    if node.type in _RECORDS and isinstance(kind, StructType):
        columns, misfit = _columns(value, node, kind, how, path, newest)
        return F.when(value.isNotNull(), F.struct(*columns)), misfit
    new = newest.items or _NO_NODE
    if node.type == "array" and isinstance(kind, ArrayType):
        items, element = node.items, kind.elementType
        assert items is not None
        bad = F.exists(value, lambda one: _fitted(one, items, element, how, path, new)[1])
        found = F.transform(value, lambda one: _fitted(one, items, element, how, path, new)[0])
        return found, F.coalesce(bad, F.lit(False))
    if node.type == "map" and isinstance(kind, MapType):
        of_keys, of_values = ArrayType(kind.keyType), ArrayType(kind.valueType)
        texts, items, latest = (Node("array", None, items=one) for one in (_TEXT, node.items, new))
        keys = _fitted(F.map_keys(value), texts, of_keys, how, path)
        values = _fitted(F.map_values(value), items, of_values, how, path, latest)
        return map_of(value, keys, values)
    if node.type == "union":
        return _fitted_union(value, node, kind, how, path, newest)
    if not _may_fit(node, kind, how, path):
        return F.lit(None).cast(kind), value.isNotNull()
    found = _leaf(value, node, kind, how, path)
    return found, value.isNotNull() & found.isNull()


def _leaf(value: Column, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]) -> Column:
    if node.type in ("int", "long"):
        return of_long(value, kind, node.unit or how.unit(path))
    if node.type == "float" and isinstance(kind, StringType):
        return value.cast("string")  # the shortest text of a FLOAT, not of a DOUBLE
    if node.type in ("float", "double"):
        return of_double(value, kind)
    if node.type == "unscaled":
        number = DecimalType(_MOST_DIGITS, node.scale)
        return of_decimal(of_unscaled(F.base64(value), node.scale, number), kind)
    if node.type == "variable":
        number, scale = node.part(value, "value"), node.part(value, "scale")
        return of_text(text_of_unscaled(F.base64(number), scale.cast("string")), kind)
    of_binary = dict.fromkeys(("bytes", "fixed", "encoded"), of_bytes)
    readers = {"decimal": of_decimal, "boolean": of_boolean, **of_binary}
    if node.type in readers:
        return readers[node.type](value, kind)
    text = value.cast("string")
    return of_text(F.when(F.is_valid_utf8(text), text), kind, how, path)


def _columns(
    value: Column, node: Node, kind: StructType, how: Reading, path: tuple[str, ...], newest: Node
) -> tuple[list[Column], Column]:
    """Returns the wanted fields of a record, and whether one of them does not fit (never null)."""
    columns, bad = list[Column](), list[Column]()
    for f, name in zip(kind.fields, _written(node, kind, newest), strict=True):
        inner, new = (*path, f.name), newest.fields.get(f.name, _NO_NODE)
        if name in node.fields:
            part = node.part(value, name)
            found, misfit = _fitted(part, node.fields[name], f.dataType, how, inner, new)
            other, text = f.metadata.get(COUNTS_IF, ("", ""))
            if other in node.fields:
                misfit &= node.part(value, other).cast("string").eqNullSafe(text)
            bad.append(misfit)
        elif isinstance(new.default, str | int | float) and not node.fields.keys() & {*was(f)}:
            found = _default(new.default, new, f.dataType, how, inner)
        else:
            found = F.lit(None).cast(f.dataType)
            bad.append(F.lit(other_case(name, node.fields, kind) is not None))
        columns.append(found.alias(f.name))
    return columns, value.isNotNull() & any_of(bad)


def _fitted_union(
    value: Column, node: Node, kind: DataType, how: Reading, path: tuple[str, ...], newest: Node
) -> tuple[Column, Column]:
    """Returns the present member of a union, which Spark reads as a struct with a field per member."""
    columns, bad = list[Column](), list[Column]()
    for place, of_member in _members(node, kind):
        if place >= len(node.members):
            columns.append(F.lit(None).cast(of_member))
            continue
        member = value[f"member{place}"]
        part, of_part = member[_field_at(0)], node.members[place]
        new = _same_member(newest, of_part)
        found, misfit = _fitted(part, of_part, of_member, how, path, new)
        columns.append(found)
        bad.append(member.isNotNull() & misfit)
    if not _by_member(kind):
        return F.coalesce(*columns), any_of(bad)
    assert isinstance(kind, StructType)
    named = [column.alias(name) for name, column in zip(kind.names, columns, strict=True)]
    return F.when(value.isNotNull(), F.struct(*named)), any_of(bad)


def _same_member(newest: Node, node: Node) -> Node:
    """Returns the member of a union's newest version that is the given one; ``null`` if it has none."""
    same = (one for one in newest.members or [newest] if (one.type, one.name) == (node.type, node.name))
    return next(same, _NO_NODE)


def _by_member(kind: DataType) -> bool:
    return isinstance(kind, StructType) and all(_MEMBER.fullmatch(n) for n in kind.names)


def _members(node: Node, kind: DataType) -> list[tuple[int, DataType]]:
    """Returns the places of the members that a column takes, each with its type."""
    if isinstance(kind, StructType) and _by_member(kind):
        return [(int(f.name.removeprefix("member")), f.dataType) for f in kind.fields]
    return [(place, kind) for place in range(len(node.members))]


def _written(node: Node, wanted: StructType, newest: Node = _NO_NODE) -> list[str]:
    """Returns the columns' names in a record's schema."""
    every = (*node.fields.items(), *newest.fields.items())
    groups = [{name, *one.aliases} for name, one in every if one.aliases]
    return [_written_as(f.name, {*node.fields}, groups) for f in wanted.fields]


def _written_as(column: str, names: set[str], groups: Sequence[set[str]]) -> str:
    """Returns a column's name in a record's schema: its own, or an alias."""
    if column in names:
        return column
    found = {n for group in groups if column in group for n in group & names}
    return min(found, default=column)


def _default(
    value: str | int | float, node: Node, kind: DataType, how: Reading, path: tuple[str, ...]
) -> Column:
    """Returns a field's default in JSON as a value of a type; null if it does not fit."""
    none = F.lit(None).cast(kind)
    if not _may_fit(node, kind, how, path):
        return none
    if isinstance(value, bool):
        return of_boolean(F.lit(value), kind)
    if isinstance(value, str):
        # A default of bytes is a text with a character for each byte; that of a decimal is no number.
        known = node.type in ("string", "enum", "union") or (node.type in _BYTES and value.isascii())
        return of_text(F.lit(value), kind, Reading(base64=False)) if known else none
    if isinstance(value, int):
        node = next((one for one in node.members if one.type in ("int", "long")), node)
        return of_long(F.lit(value).cast("bigint"), kind, node.unit or how.unit(path))
    return of_double(F.lit(value), kind)


_BYTES = ("bytes", "fixed")
