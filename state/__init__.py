"""All access to Redis. Entry: ``store.Store``; ``keys`` lists all keys.

No decision depends on this process's clock, and no token waits for Redis. Every coroutine that uses Redis raises
StoreUnavailable; commands may be repeated.
"""
