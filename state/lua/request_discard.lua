-- Deletes a request that has ended.
-- KEYS request, journal, logprobs
-- Returns 1, or 0 for an unfinished request and for none.

local state = tonumber(redis.call('HGET', KEYS[1], 'state'))
if state and state < FIRST_END then
  return 0
end
return math.min(1, redis.call('UNLINK', unpack(KEYS)))
