"""What every process needs: settings, logs, errors, health, metrics, TLS and a gRPC server that drains."""
