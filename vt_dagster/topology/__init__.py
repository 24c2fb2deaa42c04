"""Streams and tables as typed values, the operators between them, and the checks on both."""
