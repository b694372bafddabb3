"""The program of a prefill worker."""
