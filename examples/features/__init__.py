"""A feature store's training set, with and without a leak."""
