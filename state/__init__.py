"""All access to Redis: requests, journals, registrations, quotas. Entry: ``store.Store``; ``keys`` lists all keys.

No decision depends on this process's clock, and no token waits for Redis.
"""
