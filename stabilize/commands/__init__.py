"""What the verbs of `stabilize` do; imported by `stabilize.cli` alone."""
