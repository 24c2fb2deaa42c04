"""``error_messages.txt`` lists every error message of the library: what was expected, what was found,
what to do. After a change of messages, rewrite it with ``python -m tests.test_messages``, and read it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import vt_dagster.errors as errors
from tests.syntax_trees import files, nodes, tree

LIST = Path(__file__).with_name("error_messages.txt")

OURS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.VtDagsterError)
}
"""Names of our errors."""

TO_DO = re.compile(
    r"\b(add|aggregate|break|cast|check|choose|convert|copy|correct|create|declare|deliver|end|find|give|"
    r"install|keep|leave|lengthen|limit|look|make|materialize|mend|move|name|nothing was|pass|pipe|put|"
    r"raise|read|remove|rename|replay|reprocess|return|run|see|select|set|shorten|start|stop|take|try|"
    r"unset|use|write)\b",
    re.IGNORECASE,
)
"""Words that say what to do."""

PLAIN = re.compile(
    r"(must be|must have|expected|is one of|takes|needs)\b.*(got|has|found|none|example)"
)
"""A message with the expected and the given value needs no word of ``TO_DO``."""


def text_of(node: ast.AST, constants: dict[str, str]) -> str:
    """Returns a message as in the source, with ``…`` for each value that is no constant text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, constants) for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body, constants)}|{text_of(node.orelse, constants)}"
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return constants.get(node.value.id, "…")
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        return _plural(node.value)
    return "…"


def _plural(call: ast.Call) -> str:
    """Returns ``… rows`` for ``counted(n, "row")``."""
    if not isinstance(call.func, ast.Name) or call.func.id != "counted":
        return "…"
    words = [text_of(word, {}) for word in call.args[1:]]
    return f"… {words[1] if words[1:] else f'{words[0]}s'}"


@cache
def messages() -> tuple[tuple[str, str, str], ...]:
    """Module, error and message, in the order of the sources."""
    return tuple(_messages())


def _messages() -> Iterator[tuple[str, str, str]]:
    for path in files("vt_dagster"):
        constants = {
            str(getattr(one.targets[0], "id", "")): text_of(one.value, {})
            for one in tree(path).body
            if isinstance(one, ast.Assign)
            and isinstance(one.value, ast.Constant | ast.BinOp | ast.JoinedStr)
        }
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in OURS and node.args:
                module = path.with_suffix("").as_posix().replace("/", ".")
                text = text_of(node.args[0], constants)
                if text.strip("…|"):
                    yield module, node.func.id, text


def listed() -> str:
    """Returns all messages, one per line, sorted by module, error and text."""
    return "".join(f"{module} {kind}: {text}\n" for module, kind, text in sorted(set(messages())))


def test_every_message_is_listed() -> None:
    assert listed() == LIST.read_text(encoding="utf-8"), "python -m tests.test_messages, then read it"


def test_every_message_says_what_to_do() -> None:
    assert len(messages()) > 150
    mute = [m for m in messages() if not TO_DO.search(m[2]) and not PLAIN.search(m[2])]
    assert mute == []


def test_counted_has_singular_and_plural() -> None:
    assert errors.counted(1, "row") == "1 row"
    assert [errors.counted(n, "row is", "rows are") for n in (0, 1234)] == [
        "0 rows are",
        "1,234 rows are",
    ]


if __name__ == "__main__":
    LIST.write_text(listed(), encoding="utf-8")
