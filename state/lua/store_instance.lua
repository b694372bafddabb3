-- Identity of the data in Redis: a new one after Redis was emptied.
-- KEYS store instance   ARGV id for a new instance
-- Returns {id of the instance, ms since it began}.

local now = now_ms()
if redis.call('HSETNX', KEYS[1], 'id', ARGV[1]) == 1 then
  redis.call('HSET', KEYS[1], 'began', integer(now))
end
local found = redis.call('HMGET', KEYS[1], 'id', 'began')
return {found[1], now - tonumber(found[2])}
