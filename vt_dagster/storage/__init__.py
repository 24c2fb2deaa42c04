"""Logs and views on Delta Lake: writes, reads, exported tables and maintenance. No Dagster.

An asset's directory under the warehouse:

``log``        append-only changelog; the append is the commit of a run
``view``       the log folded into versions or current rows; updated from the log
``quarantine`` rejected records with their reasons; updated from ``attempts``
``attempts``   data that a run stages beside its log rows; the commit names the valid attempt
"""
