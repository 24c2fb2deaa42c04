"""Why a row is as it is: what it was made of, and by which rule, down to the sources. No Spark."""
