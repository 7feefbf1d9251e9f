"""Whatever proposes tokens for the target to verify."""
