"""The gRPC server of a process, from its settings to its drain. Entry: `server`."""
