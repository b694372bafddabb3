"""Lifecycle of requests in this router: begin, run, resume, cancel, adopt; and their journal in Redis.

Entry: ``registry``.
"""
