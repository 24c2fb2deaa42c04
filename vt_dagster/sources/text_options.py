"""Spark's options of JSON and CSV: each has its effect, or is refused when definitions load.

Files are read line by line, values by ``sources.value_reader``, and bad records go to quarantine. A
Spark option that contradicts this would have no effect, so it is an error that names the alternative.
"""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from vt_dagster.errors import SourceError

Kind = Literal["jsonl", "csv", "parquet", "message"]
"""JSON lines, CSV files, Parquet files, or a JSON message of Kafka."""

UTF_8 = "utf-8"
WIDE = {"utf-16-le": "utf-16-le", "utf-16-be": "utf-16-be", "utf-16": "utf-16"}
"""Encodings whose line feed has two bytes."""

_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "'": "'"}
_SYNONYMS = {"delimiter": "sep", "charset": "encoding", "codec": "compression"}
_LONGEST_SEPARATOR = 2
"""Maximum length of a line separator in characters, as in Spark's CSV reader."""


def _flag(name: str, text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise SourceError(f"expected {name} to be 'true' or 'false', got {text!r}")
    return text.lower()


def _count(name: str, text: str) -> str:
    if re.fullmatch(r"[1-9][0-9]{0,8}", text) is None:
        raise SourceError(f"expected {name} to be a whole number from 1 on, got {text!r}")
    return text


def _text(name: str, text: str) -> str:
    return text


def unescaped(text: str) -> str:
    r"""Returns a separator or quote with Spark's escapes resolved: ``\t`` in two characters is a
    tab."""

    def one(found: re.Match[str]) -> str:
        if found[1].startswith("u"):
            return chr(int(found[1][1:], 16))
        return _ESCAPES.get(found[1], found[0])

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", one, text) if len(text) > 1 else text


def _separator(name: str, text: str) -> str:
    found = unescaped(text)
    if not found or "\n" in found or "\r" in found:
        raise SourceError(f"expected {name} to be one character or more within a line, got {text!r}")
    return found


def _character(name: str, text: str) -> str:
    found = unescaped(text)
    if len(found) != 1 or found in "\r\n":
        raise SourceError(f"expected {name} to be one character, got {text!r}")
    return found


def _character_or_none(name: str, text: str) -> str:
    return _character(name, text) if text else text


def _line_end(name: str, text: str) -> str:
    found = unescaped(text)
    if not 1 <= len(found) <= _LONGEST_SEPARATOR:
        raise SourceError(f"expected {name} to be one or two characters, got {text!r}")
    return found


def _one_of(*values: str) -> Callable[[str, str], str]:
    def check(name: str, text: str) -> str:
        found = next((v for v in values if v.lower() == text.lower()), None)
        if found is None:
            raise SourceError(f"expected {name} to be one of {', '.join(values)}, got {text!r}")
        return found

    return check


def _encoding(name: str, text: str) -> str:
    """Returns Python's name of an encoding. Its line feed must be the single byte of ASCII, or the two
    bytes of UTF-16."""
    try:
        # Java prefixes some names of Windows and IBM encodings that Python knows without the prefix.
        found = codecs.lookup(
            re.sub(r"^x-|^windows-(?=31j$)", "", text.strip(), flags=re.IGNORECASE)
        ).name
        ends = "\n".encode(found)
    except (LookupError, UnicodeError, ValueError):
        raise SourceError(
            f"expected {name} to be an encoding that Python knows, for example 'UTF-8', 'ISO-8859-1', "
            f"'windows-1252' or 'UTF-16LE', got {text!r}"
        ) from None
    if found == "utf-8-sig":
        return UTF_8
    if ends != b"\n" and found not in WIDE:
        raise SourceError(
            f"{name} {text!r} has no line feed of one byte, which separates lines: expected UTF-8, "
            "UTF-16 or an encoding that contains ASCII; convert the files"
        )
    return found


_FORMATS = {
    "timeZone": _text,
    "dateFormat": _text,
    "timestampFormat": _text,
    "timestampNTZFormat": _text,
}
_LINES = {"encoding": _encoding, "lineSep": _line_end}
_JSON = {
    "allowComments": _flag,
    "allowUnquotedFieldNames": _flag,
    "allowSingleQuotes": _flag,
    "allowNumericLeadingZeros": _flag,
    "allowNonNumericNumbers": _flag,
    "allowBackslashEscapingAnyCharacter": _flag,
    "allowUnquotedControlChars": _flag,
}
_CSV = {
    "sep": _separator,
    "quote": _character_or_none,
    "escape": _character,
    "charToEscapeQuoteEscaping": _character,
    "comment": _character,
    "header": _flag,
    "ignoreLeadingWhiteSpace": _flag,
    "ignoreTrailingWhiteSpace": _flag,
    "nullValue": _text,
    "emptyValue": _text,
    "nanValue": _text,
    "positiveInf": _text,
    "negativeInf": _text,
    "maxColumns": _count,
    "unescapedQuoteHandling": _one_of(
        "STOP_AT_CLOSING_QUOTE",
        "BACK_TO_DELIMITER",
        "STOP_AT_DELIMITER",
        "SKIP_VALUE",
    ),
}
FOLLOWED: dict[Kind, dict[str, Callable[[str, str], str]]] = {
    "jsonl": {**_FORMATS, **_LINES, **_JSON},
    "csv": {**_FORMATS, **_LINES, **_CSV},
    "parquet": {},
    "message": {**_FORMATS, **_JSON},
}
"""The supported options, with the check of their values."""

_TYPES = "the schema defines the types of columns: remove it"
_WRITES = "it is an option for writing, and a source only reads: remove it"
_COUNTS = (
    "bad records go to quarantine, and max_bad_share is the share that a run accepts: remove it, and "
    "set max_bad_share"
)
_LISTS = "the source's own settings select the files: remove it, and set pattern or path"
REFUSED = {
    "mode": _COUNTS,
    "columnNameOfCorruptRecord": _COUNTS,
    "multiLine": "a record is one line, which defines its position: deliver JSON lines, CSV without "
    "line breaks in fields, or Parquet",
    "locale": "numbers and dates are read without a locale, with a point before the fraction: declare "
    "the column as STRING and convert it in map_values, for example try_to_number(replace(price, ',', "
    "'.'), '999999.99')",
    "enableDateTimeParsingFallback": "a time in another format is unreadable: remove it, and set "
    "dateFormat or timestampFormat",
    "maxCharsPerColumn": "a longer value would fail the run: remove it, values of any length are read",
    "compression": "the first bytes and the name of a file define its compression: remove it",
    "inferSchema": _TYPES,
    "samplingRatio": _TYPES,
    "preferDate": _TYPES,
    "prefersDecimal": _TYPES,
    "primitivesAsString": _TYPES,
    "inferTimestamp": _TYPES,
    "dropFieldIfAllNull": _TYPES,
    "singleVariantColumn": _TYPES,
    "mergeSchema": _TYPES,
    "enforceSchema": "columns match by the names in the header: remove it",
    "columnPruning": "every line is checked as a whole: remove it",
    "inputBufferSize": "lines are parsed one by one: remove it",
    "useUnsafeRow": "it is internal to Spark: remove it",
    "extension": _WRITES,
    "escapeQuotes": _WRITES,
    "quoteAll": _WRITES,
    "pretty": _WRITES,
    "ignoreNullFields": _WRITES,
    "writeNonAsciiCharacterAsCodePoint": _WRITES,
    "pathGlobFilter": _LISTS,
    "recursiveFileLookup": "sub-directories are read; set recursive=False of the source to skip them",
    "modifiedBefore": _LISTS,
    "modifiedAfter": _LISTS,
    "ignoreCorruptFiles": "set on_bad_file='quarantine' of the source instead",
    "ignoreMissingFiles": "a file that is removed while a run reads it fails the run: remove it",
}
"""The options that are refused, with the reason and the way out."""
_AS_IT_IS = {
    "mode": "permissive",
    "multiline": "false",
    "inferschema": "false",
    "locale": "en-us",
    "recursivefilelookup": "true",
    "maxcharspercolumn": "-1",
}
"""Values of refused options that are accepted, since they match the behaviour."""


def checked(what: str, kind: Kind, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns a user's options in Spark's spelling, with strings as values.

    Args:
        what: the owner of the options, for messages.

    Raises:
        SourceError: an option is unknown, has no effect, is given twice, or has a wrong value.
    """
    followed = FOLLOWED[kind]
    of_other_kinds = {name for some in FOLLOWED.values() for name in some} - {*followed}
    spelled = {n.lower(): n for n in (*followed, *REFUSED, *of_other_kinds)}
    found: dict[str, str] = {}
    for given, value in options.items():
        name = spelled.get(str(given).lower())
        name = name or _SYNONYMS.get(str(given).lower())
        if name is None:
            raise SourceError(
                f"{what}: expected an option of Spark, got {given!r}{_near(str(given), followed)}"
            )
        text = value if isinstance(value, str) else _as_text(what, name, value)
        if name not in followed:
            if _AS_IT_IS.get(name.lower()) == text.lower() and name in REFUSED:
                continue
            why = REFUSED.get(name) or f"it is an option of other sources, not of {_NAMES[kind]}"
            raise SourceError(f"{what}: the option {given!r} has no effect, expected none: {why}")
        if name in found:
            raise SourceError(f"{what}: the option {name!r} is given twice; remove one of them")
        try:
            found[name] = followed[name](f"the option {given!r}", text)
        except SourceError as error:
            raise SourceError(f"{what}: {error}; correct it") from None
    return found


_NAMES = {"jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet", "message": "JSON messages"}


def _as_text(what: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise SourceError(f"{what}: expected a text for the option {name!r}, got {value!r}; correct it")


def _near(given: str, followed: Mapping[str, Any]) -> str:
    known = {n.lower(): n for n in (*followed, *_SYNONYMS, *REFUSED)}
    near = difflib.get_close_matches(given.lower(), known, 1)
    meant = f"; did you mean {known[near[0]]!r}?" if near else ""
    some = f"some of {', '.join(sorted(followed))}" if followed else "none"
    return f"{meant or ';'} expected {some}"


def encoding_of(options: Mapping[str, str]) -> str:
    """Returns the declared encoding of files; UTF-8 by default."""
    return options.get("encoding", UTF_8)


__all__ = ["FOLLOWED", "REFUSED", "UTF_8", "WIDE", "Kind", "checked", "encoding_of", "unescaped"]
