"""``vt-dagster explore``: local, read-only web pages for a warehouse. No Spark."""
