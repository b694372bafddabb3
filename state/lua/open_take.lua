-- Moves requests of a router that is not registered to another router's open set.
-- KEYS expiry, peers, owners, open set of the dead router, open set of its successor
-- ARGV id and incarnation of the dead router, its name, the successor's name (incarnation/id), maximum requests, open_ms
-- Returns {'registered'} or {'taken', request...}.

local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ends and tonumber(ends) > now_ms() and redis.call('HGET', KEYS[2], 'i:' .. ARGV[1]) == ARGV[2] then
  return {'registered'}
end
local taken = redis.call('SPOP', KEYS[4], ARGV[5])
if #taken > 0 then
  redis.call('SADD', KEYS[5], unpack(taken))
  redis.call('SADD', KEYS[3], ARGV[4])
  keep(ARGV[6], KEYS[5], KEYS[3])
end
if redis.call('EXISTS', KEYS[4]) == 0 then
  redis.call('SREM', KEYS[3], ARGV[3])
end
return {'taken', unpack(taken)}
