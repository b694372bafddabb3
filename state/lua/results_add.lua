-- Adds ended requests to the index of results. One that is there gets its new time and bytes.
-- KEYS ended, bytes   ARGV ended_ms, then for each: request, bytes
-- Returns the bytes of all results in the index.

local now, more = integer(now_ms()), 0
for index = 2, #ARGV, 2 do
  local request, bytes = ARGV[index], tonumber(ARGV[index + 1])
  more = more + bytes - tonumber(redis.call('HGET', KEYS[2], request) or 0)
  redis.call('ZADD', KEYS[1], now, request)
  redis.call('HSET', KEYS[2], request, bytes)
end
local total = redis.call('HINCRBY', KEYS[2], 'total', integer(more))
keep(ARGV[1], KEYS[1], KEYS[2])
return total
