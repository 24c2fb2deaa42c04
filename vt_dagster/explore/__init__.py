"""``vt-dagster explore``: a local web page on a warehouse. No Spark, and nothing is written."""
