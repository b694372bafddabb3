"""One request from admission to its end: its output stream, its attempts and their workers.

Entry: ``registry``.
"""
