"""The operators: DataFrame in, DataFrame out. No session, no action, no clock, no I/O."""
