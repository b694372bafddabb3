"""Tests of the correctness of measurements, not of speed."""
