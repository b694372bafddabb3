-- Renews leases, and writes those again that Redis lost.
-- KEYS in flight, charged   ARGV lease_ms, requests...

local ends = integer(now_ms() + ARGV[1])
for index = 2, #ARGV do
  redis.call('ZADD', KEYS[1], ends, ARGV[index])
end
keep(ARGV[1], KEYS[1], KEYS[2])
return #ARGV - 1
