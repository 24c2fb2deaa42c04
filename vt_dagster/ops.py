"""The ops that assets are made of, for graphs of your own; see ``vt_dagster.orchestration.ops``."""

from vt_dagster.orchestration.ops import *  # noqa: F403
