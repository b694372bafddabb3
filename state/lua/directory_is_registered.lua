-- KEYS peers, expiry   ARGV id, incarnation
-- Returns 1 if this incarnation is registered, else 0.

local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if ends and tonumber(ends) > now_ms() and redis.call('HGET', KEYS[1], 'i:' .. ARGV[1]) == ARGV[2] then
  return 1
end
return 0
