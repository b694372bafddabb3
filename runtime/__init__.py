"""The shell of every process: settings, logs, errors, health, metrics, and a gRPC server that owes nothing."""
