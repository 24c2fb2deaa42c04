"""Texts that are made of what the library and its tests have already: rules, errors, commands."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import click
import typer

from vt_dagster.components.topology_component import described
from vt_dagster.orchestration.metadata import KINDS
from vt_dagster.rules import METRICS, RULES
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import OPTIONS, Consumer, Option

ROOT = Path(__file__).parents[2]


@cache
def _format() -> str:
    return (ROOT / "tests" / "conformance" / "FORMAT.md").read_text(encoding="utf-8")


def observed(sections: str) -> str:
    """What Kafka Streams does, as its recorded output shows it: sections of the rule book."""
    found: list[str] = []
    for number in sections.split():
        part = re.search(rf"^### {re.escape(number)} .+?\n(.*?)(?=^##)", _format(), re.DOTALL | re.M)
        if part is None:
            raise ValueError(f"expected a section of FORMAT.md, got {number}")
        found.append(part.group(1).strip())
    return "\n\n".join(found)


def differences(words: str) -> str:
    """The rows of the table of differences that tell of one of some words."""
    text = (ROOT / "docs" / "operators" / "differences.md").read_text(encoding="utf-8")
    head, rule, *rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    wanted = [w.replace("_", " ") for w in words.split()]
    kept = [row for row in rows if any(w in row for w in wanted)]
    if not kept:
        raise ValueError(f"no difference tells of {wanted}: correct the marker")
    return "\n".join([head, rule, *kept])


def rules() -> str:
    return "\n".join(
        [
            "| rule | what it decides |",
            "|---|---|",
            *(f"| `{r.name}` | {r.description} |" for r in RULES.values()),
        ]
    )


def typed_ops() -> str:
    """The op of each operator, with the graph that does what the one op of ``build_asset`` does."""
    lines = ["| op | of the result of | the asset of `build_asset` does in one op |", "|---|---|---|"]
    for word in sorted(KINDS):
        made = " or ".join(f"`{kind}`" for kind in KINDS[word])
        waits = word in ("stream_table_join", "corrected_join")
        buffer = "`grace_buffer_op` where it has a grace period, " if waits else ""
        steps = f"`read_logs_op`, {buffer}`{word}_op`, `write_op`"
        lines.append(f"| `{word}_op` | {made} | {steps} |")
    lines.append("| `put_op` | a source | `read_op`, `put_op`, `write_op` |")
    return "\n".join(lines)


def metrics() -> str:
    rows = (f"| `{name}` | {one.description} |" for name, one in METRICS.items())
    return "\n".join(["| number | what it counts |", "|---|---|", *rows])


def errors() -> str:
    """All messages, by the class of the error."""
    lines = (ROOT / "tests" / "error_messages.txt").read_text(encoding="utf-8").splitlines()
    by_class: dict[str, list[str]] = {}
    for line in lines:
        found = re.match(r"([\w.]+) (\w+): (.+)", line)
        if found is not None:
            by_class.setdefault(found.group(2), []).append(found.group(3))
    parts: list[str] = []
    for kind in sorted(by_class):
        told = [f"- <code>{_escaped(text)}</code>" for text in sorted(set(by_class[kind]))]
        parts += [f"## {kind}", "", *told, ""]
    return "\n".join(parts)


def _escaped(text: str) -> str:
    for sign, code in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():
        text = text.replace(sign, code)
    return re.sub(r"([*_`\[\]\\{}])", lambda m: f"&#{ord(m.group(1))};", text)


def commands() -> str:
    """Each command with its options, as ``--help`` has them."""
    from vt_dagster.cli import COMMANDS, app

    group = typer.main.get_command(app)
    context = click.Context(group, info_name="vt-dagster")
    parts: list[str] = []
    for name in COMMANDS:
        command = group.get_command(context, name)  # pyright: ignore[reportAttributeAccessIssue]
        inner = getattr(command, "commands", None)
        parts += _command(name, command)
        for sub in inner or ():
            parts += _command(f"{name} {sub}", inner[sub])
    return "\n".join(parts)


def _command(name: str, command: click.Command) -> list[str]:
    about = " ".join((command.help or "").split())
    given = [str(p.name).upper() for p in command.params if p.param_type_name == "argument"]
    parts = [
        f"## vt-dagster {name}",
        "",
        _escaped(about),
        "",
        f"`{' '.join(['vt-dagster', name, *given])}`",
        "",
    ]
    options = [p for p in command.params if p.name != "help"]
    if options:
        parts += ["| argument or option | meaning |", "|---|---|"]
    for one in options:
        said = " ".join((getattr(one, "help", None) or "").split()).replace("|", "\\|")
        given = one.param_type_name == "argument"
        shown = ", ".join(f"`{o.upper() if given else o}`" for o in (*one.opts, *one.secondary_opts))
        parts.append(f"| {shown} | {_escaped(said)} |")
    return [*parts, ""]


def options() -> str:
    """The options of each kind of node, as the classes and the registry describe them."""
    parts, seen = list[str](), set[str]()
    titles = {Stream: "Streams and tables", Table: "Tables", VersionedTable: "Versioned tables"}
    for kind, title in titles.items():
        own = [o for o in OPTIONS if o.name in kind.__dataclass_fields__ and o.name not in seen]
        seen |= {o.name for o in own}
        if kind is Stream:
            own = [o for o in own if o.name != "freshness"]
            seen.discard("freshness")
        parts += [f"## {title}", "", "| option | type | default | records | metadata | what it is |"]
        parts += ["|---|---|---|---|---|---|", *(_option(kind, one) for one in own), ""]
    return "\n".join(parts)


def _option(kind: Any, option: Option) -> str:
    declared: Field[Any] = kind.__dataclass_fields__[option.name]
    hint = get_type_hints(kind)[option.name]
    type_ = hint.__name__ if isinstance(hint, type) else re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(hint))
    default = "required" if declared.default is MISSING else f"`{declared.default!r}`"
    default = default if declared.default_factory is MISSING else "`{}`"
    text = re.split(r"(?<=[.]) ", described(kind, option.name) or "")[0]
    more = [text[:1].upper() + text[1:]]
    more += [f"Not for the result of an operator, {why}." for why in [option.not_of_results] if why]
    more += [f"Not for a source of full snapshots, {why}." for why in [option.not_of_states] if why]
    more += [f"Not beside `{other}`: {why}." for other, why in option.excludes.items()]
    marks = " | ".join("yes" if one else "" for one in (option.defines_records, option.shown))
    cells = [f"`{option.name}`", f"`{type_}`", default]
    said = re.sub(r"``(.+?)``", r"`\1`", " ".join(more))
    return f"| {' | '.join(one.replace('|', chr(92) + '|') for one in cells)} | {marks} | {said} |"


def option_matrix() -> str:
    """Which consumer reads a table with which option, and why not."""
    of = [option for option in OPTIONS if option.refused or option.kept_if]
    lines = [
        f"| | {' | '.join(f'`{option.name}`' for option in of)} |",
        "|---" * (len(of) + 1) + "|",
    ]
    for consumer in Consumer:
        told = " | ".join(_cell(option, consumer) for option in of)
        lines.append(f"| {consumer.value} | {told} |")
    return "\n".join(lines)


def _cell(option: Option, consumer: Consumer) -> str:
    if consumer is Consumer.SPINE and option.name not in Stream.__dataclass_fields__:
        return ""
    if consumer in option.read_if:
        return f"yes, if {option.read_if[consumer]}"
    if consumer in option.kept_if:
        return f"kept, if {option.kept_if[consumer]}"
    refusal = option.refused.get(consumer)
    return "yes" if refusal is None else f"**no**: {refusal.why}; {refusal.instead}"
