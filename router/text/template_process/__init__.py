"""Code of the confined process that renders chat templates; `process` is its entry.

It imports only jinja2 outside the standard library: the process has no other package of ours (`template_channel.py`).
"""
