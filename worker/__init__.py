"""A worker of either role: the engine on its thread, and its gRPC services."""
