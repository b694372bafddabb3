-- Registers an incarnation. Of several under one id, the one that registered last is the present one.
-- KEYS peers, expiry, changes   ARGV id, incarnation, registration, load, registration_ms, directory_ms
-- Returns the time of its first registration, in microseconds.

local id, now = ARGV[1], now_us()
local found = redis.call('HMGET', KEYS[1], 'i:' .. id, 's:' .. id)
local since = tonumber(found[2])
if found[1] ~= ARGV[2] then
  since = math.max(now, (since or 0) + 1)
end
redis.call('HSET', KEYS[1], 'i:' .. id, ARGV[2], 's:' .. id, integer(since), 'f:' .. id, ARGV[3], 'l:' .. id, ARGV[4])
redis.call('ZADD', KEYS[2], integer(math.floor(now / 1000) + ARGV[5]), id)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'changed', 1)
keep(ARGV[6], KEYS[1], KEYS[2], KEYS[3])
return since
