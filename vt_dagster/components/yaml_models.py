"""Pydantic models of the YAML, made from the parameters of Python classes and methods.

A new parameter of such a class or method is thereby a new YAML setting. This module only converts YAML
values to Python values and words its errors; the Python classes check the values.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from vt_dagster.errors import ContractError
from vt_dagster.topology.durations import parse_length


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
    text = str(value).strip()
    return -as_duration(text[1:]) if text.startswith("-") else as_duration(value)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


DurationText = Annotated[timedelta | str, BeforeValidator(as_duration, json_schema_input_type=str)]
SignedDurationText = Annotated[
    timedelta | str, BeforeValidator(as_signed_duration, json_schema_input_type=str)
]
Texts = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=list[str] | str)]


class _NotNull:
    """Removes null from the JSON schema for editors and `dg check yaml`, since null is refused."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        found = handler(core_schema)
        kept = [one for one in found.pop("anyOf", []) if one != {"type": "null"}]
        return found | (kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {})


def optional(kind: Any) -> Any:
    """Makes the type of a setting that may be omitted."""
    return Annotated[kind | None, _NotNull]


class Part(BaseModel):
    """A YAML mapping. The error for an unknown name lists the known ones."""

    model_config = ConfigDict(extra="forbid")
    target: ClassVar[Callable[..., Any] | None] = None
    """The class or function to call with the YAML's values."""

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_valid(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
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
            near = difflib.get_close_matches(name, cls.model_fields, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            said = f"{name!r} is not known here; {meant}expected {', '.join(cls.model_fields)}"
            return _problem(where, problem["input"], said)
        return {k: problem[k] for k in ("type", "loc", "input", "ctx") if k in problem}

    @property
    def given(self) -> list[str]:
        """The names set in the YAML, in documented order."""
        return [name for name in type(self).model_fields if name in self.model_fields_set]

    def values(self) -> dict[str, Any]:
        """Returns the values set in the YAML as Python values, by name."""
        return {name: _python(getattr(self, name)) for name in self.given}

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


def _problem(where: tuple[Any, ...], given: Any, said: str) -> Any:
    return {"type": "value_error", "loc": where, "input": given, "ctx": {"error": ValueError(said)}}


def _python(value: Any) -> Any:
    if isinstance(value, Part):
        return value.make()
    return tuple(_python(v) for v in value) if isinstance(value, list) else value


def choice(name: str, doc: str, of: Mapping[str, type[Part]], /, **more: Any) -> type[Choice]:
    """Makes a model with one of ``of``; ``more``: other fields, as for pydantic's create_model."""
    fields: dict[str, Any] = {n: (optional(p), None) for n, p in of.items()}
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
        known = get_type_hints(target.__init__ if _is_plain(target) else target)
        for parameter in inspect.signature(target).parameters.values():
            told = parameter.name, parameter.kind
            if told[0] in {"self", *leave_out, *more} or told[1] is parameter.VAR_KEYWORD:
                continue
            required = parameter.default is parameter.empty
            kind = _yaml_type(known.get(parameter.name, parameter.annotation), types)
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind, required = Texts, True
            about = Field(
                default=... if required else None,
                description=described(target, parameter.name),
            )
            fields.setdefault(parameter.name, (kind if required else optional(kind), about))
    doc = inspect.getdoc(targets[0])
    with warnings.catch_warnings():  # pydantic's own BaseModel.schema is deprecated, ours is a field
        warnings.filterwarnings("ignore", 'Field name "schema"')
        made = create_model(name, __base__=Part, __doc__=doc, **(more | fields))
    made.target = targets[0]
    return made


def _is_plain(target: Any) -> bool:
    """Returns whether a class is no dataclass, so that ``__init__`` has its annotations."""
    return isinstance(target, type) and not hasattr(target, "__dataclass_fields__")


def _yaml_type(hint: Any, types: Mapping[Any, Any]) -> Any:
    """Returns the YAML type of a parameter; for a union, the first member with a YAML type."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    known = {timedelta: DurationText, Sequence[str]: Texts, tuple[str, ...]: Texts, **types}
    for member in members:
        if member in known:
            return known[member]
    for member in members:
        if member in (int, float, str, bool, dict[str, str], dict[str, Any]):
            return member
        if get_origin(member) is Literal:
            return member
        if get_origin(member) is Mapping and get_args(member)[0] is str:
            return dict[str, str]
    if members == (Any,) or all(m is NoneType for m in members):
        return Any
    raise TypeError(f"the YAML has no type for {hint}; add one to types or more")


def described(target: Any, name: str) -> str | None:
    """Returns the text of a parameter in the ``Args:`` of a docstring."""
    kinds = target.__mro__ if isinstance(target, type) else (target,)
    doc = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in kinds)
    found = re.search(rf"^ {{4}}(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return re.sub(r"\s+", " ", found.group(1)) if found else None
