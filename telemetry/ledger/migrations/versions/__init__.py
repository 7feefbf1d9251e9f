"""One file per change of the ledger's schema."""
