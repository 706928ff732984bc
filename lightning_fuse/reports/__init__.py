"""Reports: the ledger before a run, comparisons of finished ones. Reads runs with neither torch nor Lightning."""
