"""All access to Redis: requests, journals, registrations, quotas.

keys.py            every key, its type and its time to live
store.py           `Store`: connections and the parts below
client.py          deadlines, reconnects, scripts; one error for an unavailable Redis
scripts.py         the scripts in lua/, each one atomic step
ids.py             ids of requests, incarnations of processes, request states
requests.py        accept, write, read and adopt a request
owned.py           a request at its owner
stored.py          a request read from Redis, validated
journal.py         output tokens as bytes
logprobs.py        logprobs as bytes
directory.py       registered workers and routers
open_requests.py   each router's unfinished requests, and their takeover
store_instance.py  distinguishes an emptied Redis from an unknown id
quota.py           requests in flight and tokens a minute, per tenant
private_redis.py   a Redis for one machine

No decision depends on this process's clock, and no token waits for Redis.
"""
