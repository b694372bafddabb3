from tests.state.conftest import bare, server, store

__all__ = ["bare", "server", "store"]
