"""A drafter that reads the target's hidden states: one decoder layer in the manner of EAGLE-3."""
