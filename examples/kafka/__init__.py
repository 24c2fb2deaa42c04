"""Orders with their prices, from topics to a topic."""
