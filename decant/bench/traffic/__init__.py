"""Requests of a benchmark, their arrivals, and the clients that send them."""
