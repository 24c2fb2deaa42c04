"""One run of an asset: what it takes, operates on, and commits; and what follows from commits."""
