"""Payments in euros; README.md says what to look at."""
