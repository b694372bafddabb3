"""Reasoning in an output, apart from its answer: one entry of ``formats`` per kind of markers that templates name."""
