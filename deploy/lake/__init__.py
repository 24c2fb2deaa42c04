"""A small lake: prices and orders of a shop, and a report of another team."""
