-- Lists registrations, and removes expired ones.
-- KEYS peers, expiry, changes
-- Returns {id of the last change, ms until the next expiry or -1, then for each: registration, load, ms until expiry}.

local now = now_ms()
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
for _, id in ipairs(gone) do
  redis.call('HDEL', KEYS[1], 'i:' .. id, 's:' .. id, 'f:' .. id, 'l:' .. id)
end
if #gone > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'changed', 1)
end

local change = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
local next_end = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
local listing = {change and change[1] or '0-0', next_end and tonumber(next_end) - now or -1}
local ends = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #ends, 2 do
  local found = redis.call('HMGET', KEYS[1], 'f:' .. ends[i], 'l:' .. ends[i])
  table.insert(listing, found[1])
  table.insert(listing, found[2])
  table.insert(listing, tonumber(ends[i + 1]) - now)
end
return listing
