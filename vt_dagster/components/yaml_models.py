"""The YAML's models, made from the parameters of what they stand for.

A parameter that a class or method of ``vt_dagster`` gets is thereby one that the YAML has. Here is only
how a YAML value becomes a Python one, and what an error says; whether the values make sense is checked
where it is checked for Python.
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
    """Whether a value is to be rendered by Dagster, for example ``{{ env.RETENTION }}``."""
    return isinstance(value, str) and "{{" in value


def as_duration(value: Any) -> Any:
    """``7d``, ``1h30m``, ``250ms``: a timedelta. A template is left as it is."""
    if isinstance(value, timedelta) or is_template(value):
        return value
    try:
        return parse_length(str(value))
    except ContractError as error:
        raise ValueError(str(error)) from None


def as_signed_duration(value: Any) -> Any:
    """The same, which may be negative: ``-5m``."""
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
    """Null is refused, so the schema that editors and `dg check yaml` go by is without it."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: Any) -> Any:
        found = handler(core_schema)
        kept = [one for one in found.pop("anyOf", []) if one != {"type": "null"}]
        return found | (kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {})


def optional(kind: Any) -> Any:
    """A type that may be left out."""
    return Annotated[kind | None, _NotNull]


class Part(BaseModel):
    """A piece of YAML. An unknown name is an error that says which there are."""

    model_config = ConfigDict(extra="forbid")
    target: ClassVar[Callable[..., Any] | None] = None
    """What it stands for; it is called with what the YAML gives."""

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_valid(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        if isinstance(value, cls):
            return value
        value = cls._spelled_out(value)
        if not isinstance(value, dict):
            raise ValueError(f"expected some of {', '.join(cls.model_fields)}, got {value!r}")
        problems: list[Any] = [
            _problem(
                (name,), None, f"{name} is empty: give a value, {{}} for defaults, or leave it out"
            )
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
        """What a short form means."""
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
        """The names that the YAML has, in the order in which they are documented."""
        return [name for name in type(self).model_fields if name in self.model_fields_set]

    def values(self) -> dict[str, Any]:
        """What was given, by name, as Python has it."""
        return {name: _python(getattr(self, name)) for name in self.given}

    def make(self) -> Any:
        """The value that it stands for."""
        assert self.target is not None
        return type(self).target(**self.values())  # pyright: ignore[reportOptionalCall]


class Choice(Part):
    """A piece of YAML that gives exactly one of several, by its name."""

    choices: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[tuple[str, ...]] = ()
    """Those that need no settings, for which the name alone will do."""

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
        """The name of what was chosen."""
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
    """A model that gives one of ``of``; ``more``: other fields, as pydantic's create_model has them."""
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
    """A model with the parameters of some classes or functions; where two have one, the first counts.

    Args:
        leave_out: parameters that the YAML does not have.
        types: the YAML's type for some Python types, which are looked for in unions as well.
        more: other fields, or other types, as pydantic's create_model has them.
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
    """Whether a class is no dataclass, so that its annotations are those of ``__init__``."""
    return isinstance(target, type) and not hasattr(target, "__dataclass_fields__")


def _yaml_type(hint: Any, types: Mapping[Any, Any]) -> Any:
    """The YAML's type of a parameter: of a union, the first member that the YAML can say."""
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
    raise TypeError(f"the YAML has no type for {hint}; give one in types or in more")


def described(target: Any, name: str) -> str | None:
    """What a docstring's ``Args:`` says of a parameter."""
    kinds = target.__mro__ if isinstance(target, type) else (target,)
    doc = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in kinds)
    found = re.search(rf"^ {{4}}(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return re.sub(r"\s+", " ", found.group(1)) if found else None
