"""The handoff: two engines, one fetch, and every fault on the way."""
