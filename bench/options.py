"""Command-line options that benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse an integer of at least 1. Raises ArgumentTypeError, ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value
