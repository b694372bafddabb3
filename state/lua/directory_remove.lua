-- KEYS peers, expiry, changes   ARGV id, incarnation
-- Returns 1, or 0 if another incarnation is registered.

local id = ARGV[1]
if redis.call('HGET', KEYS[1], 'i:' .. id) ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], 'i:' .. id, 's:' .. id, 'f:' .. id, 'l:' .. id)
redis.call('ZREM', KEYS[2], id)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'changed', 1)
return 1
