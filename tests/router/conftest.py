"""The private Redis of tests/state, for the router's tests too."""

from tests.state.conftest import bare, server, store

__all__ = ["bare", "server", "store"]
