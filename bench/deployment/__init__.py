"""The parts of ``bench.router``: a deployment whose engines only take time, its clients, and gRPC without a router."""
