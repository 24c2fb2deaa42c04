"""Streams, tables, joins and sensors in a ``defs.yaml``: a Dagster component, made by ``dg scaffold``.

Errors name the file, the line and the valid values. A YAML entry has the parameters of its Python class
or method, whose docstring documents them; durations are texts like ``1h30m``.
"""

from vt_dagster.components.topology_component import TopologyComponent

__all__ = ["TopologyComponent"]
