-- Adds requests to the open set of a router.
-- KEYS open set, owners   ARGV router, open_ms, requests...

redis.call('SADD', KEYS[1], unpack(ARGV, 3))
redis.call('SADD', KEYS[2], ARGV[1])
keep(ARGV[2], KEYS[1], KEYS[2])
return redis.call('SCARD', KEYS[1])
