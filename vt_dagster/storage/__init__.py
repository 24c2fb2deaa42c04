"""Logs and views on Delta Lake, and the sources that feed them. No Dagster.

An asset's directory under the warehouse:

``log``        append-only records; appending to it is the commit of a run
``view``       what the log amounts to: versions, or current rows; brought up to date from the log
``quarantine`` what is not in the log, and why; brought up to date from ``attempts``
``attempts``   what a run prepared beside its log rows; the commit names the attempt that counts
"""
