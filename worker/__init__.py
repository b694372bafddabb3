"""The shell of a worker, whatever its role: engine thread, registration, sessions, and the internal services."""
