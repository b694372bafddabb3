"""The private Redis of tests/state, for the router's tests."""

from tests.state.conftest import bare, server, store

__all__ = ["bare", "server", "store"]
