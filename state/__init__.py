"""What outlives a process: requests, journals, who is there. The only code that talks to Redis.

keys.py          every key, its type and its lifetime
store.py         `Store`, the way in: connects and holds the parts below
client.py        deadlines, reconnecting, scripts; one error for a Redis that is away
scripts.py       the Lua in lua/: what must happen as one
names.py         requests, lives of processes, states
requests.py      accept, write, read, adopt a request; `owned.py` is what its owner holds of it
stored.py        a request as Redis has it, checked
journal.py       output tokens as bytes
logprobs.py      logprobs as bytes
directory.py     which workers and routers are there
open.py          unfinished requests per router, and taking over those of a dead one
era.py           tells an emptied Redis from an unknown id
quota.py         per tenant: requests in flight, tokens a minute
private_redis.py a Redis of one's own on one machine

Nothing here decides anything by this process's clock, and Redis is never on the path of a token.
"""
