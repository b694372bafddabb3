"""The handoff: two engines, one fetch, everything that can go wrong on the way."""
