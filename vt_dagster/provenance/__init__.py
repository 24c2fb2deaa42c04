"""Explains a row by its inputs and rules, down to the sources; estimates lateness. No Spark."""
