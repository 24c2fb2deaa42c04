"""Sources and sinks of records: files, full dumps, Delta tables, Kafka topics, and their formats."""
