"""Deployments of this machine that commands use: their records, processes and readiness."""
