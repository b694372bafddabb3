"""The parts of ``bench.router``: a deployment whose engines only take time, its clients, gRPC alone."""
