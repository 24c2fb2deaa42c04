"""Streams, tables, joins and sensors in a ``defs.yaml``: a Dagster component, made by ``dg scaffold``.

An error names the file, the line and what would be valid. What a setting means is said where Python has
it: a YAML entry has the parameters of its class or method, lengths of time are texts like ``1h30m``.
"""

from vt_dagster.components.topology_component import TopologyComponent

__all__ = ["TopologyComponent"]
