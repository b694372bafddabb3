"""The wire: `inference` is what clients see, `worker` is what router and workers say to each other."""
