"""The Dagster spec of a stream's or table's asset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import dagster as dg
from typing_extensions import TypedDict

from vt_dagster.core.table_store import start_of
from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.decorators import partitions_of
from vt_dagster.orchestration.metadata import definition_metadata, summary
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_items, definition_of
from vt_dagster.topology.specification import without_layout

_KIND = "dagster/kind/"
_ADDED = ("tags", "owners", "kinds", "metadata")
_ARGUMENTS = (
    *("key", "deps", "description", "group_name", "owners", "kinds", "metadata", "code_version"),
    *("automation_condition", "freshness_policy", "partitions_def"),
)
"""The attributes of a spec, besides tags, that are arguments of ``dagster.asset``."""


class SpecAttributes(TypedDict, total=False):
    """Attributes of a spec: the first four are added to the translator's, the others replace the
    translator's."""

    tags: Mapping[str, str]
    owners: Collection[str]
    kinds: Collection[str]
    metadata: Mapping[str, Any]
    description: str
    group_name: str
    code_version: str
    automation_condition: dg.AutomationCondition[Any]
    freshness_policy: dg.FreshnessPolicy


class TopologyTranslator:
    """Translates a stream or table to its asset's spec; override it in a subclass to adapt specs.

    .. code-block:: python

        class ByRetention(TopologyTranslator):
            def get_asset_spec(self, node):
                spec = super().get_asset_spec(node)
                return spec.merge_attributes(tags={"history": "yes" if node.versioned else "no"})

        defs = build_definitions(priced, translator=ByRetention())
    """

    def get_asset_spec(self, node: Stream) -> dg.AssetSpec:
        """Returns the spec of one asset. Its key is the node's ``key_prefix`` and name, because these
        are also the folders of its tables; its code version changes with what the node computes."""
        # A source may name the assets that deliver its input.
        sources = [getattr(one, "upstream", None) for one in (node.source, start_of(node))]
        delivering = [dg.AssetKey.from_user_string(one) for one in sources if one is not None]
        inputs = [dg.AssetKey(up.path) for up in node.inputs]
        return dg.AssetSpec(
            dg.AssetKey(node.path),
            deps=[*dict.fromkeys([*inputs, *delivering])],
            description=summary(node),
            group_name=node.group,
            owners=list(node.owners) or None,
            kinds={"spark", "deltalake", shape_of(node).kind},
            metadata=definition_metadata(node),
            code_version=code_version(node),
            partitions_def=partitions_of(node),
        )


def code_version(node: Stream) -> str:
    """Returns a digest of the meaning of a node's records; it changes when that meaning changes, not
    with whitespace and comments in SQL."""
    shape = {name: value for name, value in shape_of(node).definition().items() if value}
    unit = getattr(node.source, "timestamps", None)
    meaning = without_layout([shape, definition_of(node), None if unit is None else str(unit)])
    definition = json.dumps(meaning)
    return hashlib.sha256(definition.encode()).hexdigest()[:12]


def asset_arguments(
    node: Stream, translator: TopologyTranslator | None, attributes: SpecAttributes
) -> dict[str, Any]:
    """Returns the arguments of ``dagster.asset``.

    Raises:
        TopologyError: the spec has another key than the node, or other partitions than its source.
    """
    spec = (translator or TopologyTranslator()).get_asset_spec(node)
    if spec.key != dg.AssetKey(node.path):
        raise TopologyError(
            f"{node.name}: expected the translator's spec to have the key {'/'.join(node.path)}, got "
            f"{spec.key.to_user_string()}: the key is also the tables' directory. Set the stream's or "
            "table's key_prefix or name instead"
        )
    partitions = partitions_of(node)
    if spec.partitions_def != partitions:
        wanted = "without partitions" if partitions is None else f"with the partitions {partitions}"
        raise TopologyError(
            f"{node.name}: expected a spec {wanted}, got {spec.partitions_def}: one table has the "
            "history of all times. Partition the assets that read it; a decorated function or an "
            "AssetSource sets its own partitions_def"
        )
    return spec_arguments(spec, attributes)


def spec_arguments(spec: dg.AssetSpec, attributes: SpecAttributes) -> dict[str, Any]:
    """Returns a spec, with attributes merged in, as the arguments of ``dagster.asset``.

    Raises:
        TopologyError: an attribute is not one of :class:`SpecAttributes`, or of another type.
    """
    odd = sorted(attributes.keys() - SpecAttributes.__annotations__.keys())
    if odd:
        raise TopologyError(
            f"{spec.key.to_user_string()}: expected attributes of its spec among "
            f"{', '.join(SpecAttributes.__annotations__)}, got {', '.join(odd)}; correct or leave them "
            "out. Partitions are set by a decorated function or an AssetSource"
        )
    given: dict[str, Any] = {name: value for name, value in attributes.items() if value is not None}
    check_items(spec.key.to_user_string(), given, SpecAttributes)
    added = {name: value for name, value in given.items() if name in _ADDED}
    others: dict[str, Any] = {n: v for n, v in attributes.items() if n not in _ADDED}
    spec = spec.merge_attributes(**added).replace_attributes(**others)  # pyright: ignore[reportArgumentType]
    tags = {name: value for name, value in spec.tags.items() if not name.startswith(_KIND)}
    return {name: getattr(spec, name) for name in _ARGUMENTS} | {"tags": tags}
