-- Releases a lease, and charges the tokens used instead of those acquired. No effect without a lease.
-- KEYS in flight, charged, full_at   ARGV request, tokens used, tokens per minute or ''

local MINUTE = 60000000
local rate = tonumber(ARGV[3])
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then
  return 0
end
local charged = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
redis.call('HDEL', KEYS[2], ARGV[1])
if rate then
  local now = now_us()
  local used = math.max(0, tonumber(redis.call('GET', KEYS[3]) or 0) - now)
  used = math.max(0, used + math.floor((tonumber(ARGV[2]) - charged) * MINUTE / rate))
  redis.call('SET', KEYS[3], integer(now + used), 'PX', math.ceil(used / 1000) + 1)
end
return 1
