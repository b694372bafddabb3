"""The program of a decode worker."""
