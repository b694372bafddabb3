"""A long prompt beside running answers: a split deployment against mixed ones on the same cores."""
