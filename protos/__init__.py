"""The wire: `inference` is what clients see, `worker` is the protocol between routers and workers."""
