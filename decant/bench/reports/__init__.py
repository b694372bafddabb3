"""Figures of a run, on a terminal and as HTML."""
