"""Where records come from and go to: files, Kafka topics, and how their bytes are read."""
