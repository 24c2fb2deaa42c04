"""One run of an asset (pin, read, operate, commit), and maintenance of committed tables."""
