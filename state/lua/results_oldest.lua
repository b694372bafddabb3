-- Removes results from the index that have expired, and finds the oldest ones beyond a limit of bytes.
-- KEYS ended, bytes   ARGV ended_ms, maximum bytes, maximum results
-- Returns {bytes of all results, their number, age of the oldest in ms, request...}: the oldest results, without which
-- the others fit.

local now, most = now_ms(), tonumber(ARGV[3])
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', integer(now - ARGV[1]), 'LIMIT', 0, most)
for _, request in ipairs(expired) do
  forget_result(KEYS[1], KEYS[2], request)
end

local total = tonumber(redis.call('HGET', KEYS[2], 'total') or 0)
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local reply = {total, redis.call('ZCARD', KEYS[1]), oldest[2] and now - tonumber(oldest[2]) or 0}
local excess = total - tonumber(ARGV[2])
if excess > 0 then
  for _, request in ipairs(redis.call('ZRANGE', KEYS[1], 0, most - 1)) do
    if excess <= 0 then
      break
    end
    table.insert(reply, request)
    excess = excess - tonumber(redis.call('HGET', KEYS[2], request) or 0)
  end
end
return reply
