"""Where records come from and go to: files, dumps, Delta tables, Kafka topics, and their formats."""
