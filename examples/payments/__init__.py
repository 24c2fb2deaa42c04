"""Payments in euros; README.md explains the example."""
