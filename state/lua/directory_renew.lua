-- Renews a registration, or writes it again if it expired or Redis was emptied.
-- KEYS peers, expiry, changes   ARGV id, incarnation, registration, load, registration_ms, directory_ms, since
-- Returns 1; or 0 if a later incarnation is registered, and writes nothing.

local id, since = ARGV[1], tonumber(ARGV[7])
local found = redis.call('HMGET', KEYS[1], 'i:' .. id, 's:' .. id, 'f:' .. id)
if found[1] and found[1] ~= ARGV[2] and tonumber(found[2]) >= since then
  return 0
end
redis.call('HSET', KEYS[1], 'i:' .. id, ARGV[2], 's:' .. id, ARGV[7], 'f:' .. id, ARGV[3], 'l:' .. id, ARGV[4])
local now = now_ms()
local ends = tonumber(redis.call('ZSCORE', KEYS[2], id) or 0)
redis.call('ZADD', KEYS[2], integer(now + ARGV[5]), id)
if ends <= now or found[1] ~= ARGV[2] or found[3] ~= ARGV[3] then
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'changed', 1)
end
keep(ARGV[6], KEYS[1], KEYS[2], KEYS[3])
return 1
