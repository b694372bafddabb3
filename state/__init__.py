"""All access to Redis: requests, journals, registrations, quotas. Entry: ``store.Store``; ``keys`` lists all keys.

No decision depends on this process's clock, and no token waits for Redis. Every call raises StoreUnavailable while
Redis cannot be reached, and every command may run twice: a broken connection is retried once.
"""
