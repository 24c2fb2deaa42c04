"""Temporary settings of a session: in whatever order they end, the session gets its own values back."""

from __future__ import annotations

from typing import Any

import pytest

from vt_dagster.spark.settings import settings


class Conf:
    """A fake of a session's settings that counts the changes."""

    def __init__(self) -> None:
        self.values = {"a": "0"}
        self.changes = 0

    def get(self, key: str, default: str | None = None) -> str | None:
        return self.values.get(key, default)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value
        self.changes += 1

    def unset(self, key: str) -> None:
        del self.values[key]
        self.changes += 1


class Session:
    def __init__(self) -> None:
        self.conf = Conf()


@pytest.mark.parametrize("inner_first", [True, False])
def test_settings_contexts_end_in_any_order(inner_first: bool) -> None:
    session: Any = Session()
    first = settings(session, {"a": "1", "b": "1"})
    second = settings(session, {"a": "2", "c": "2"})
    first.__enter__()
    second.__enter__()
    assert session.conf.values == {"a": "2", "b": "1", "c": "2"}
    done, left = (second, first) if inner_first else (first, second)
    done.__exit__(None, None, None)
    assert session.conf.values == ({"a": "1", "b": "1"} if inner_first else {"a": "2", "c": "2"})
    left.__exit__(None, None, None)
    assert session.conf.values == {"a": "0"}


def test_nested_equal_settings_change_nothing() -> None:
    session: Any = Session()
    with settings(session, {"a": "1", "b": "1"}):
        changes = session.conf.changes
        with settings(session, {"b": "1", "a": "1"}):
            assert session.conf.values == {"a": "1", "b": "1"}
        assert session.conf.changes == changes
    assert session.conf.values == {"a": "0"}
