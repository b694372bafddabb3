"""What every process needs: settings and errors here, a gRPC server that drains in `serving`, channels and TLS in
`connections`, logs, metrics and traces in `telemetry`."""
