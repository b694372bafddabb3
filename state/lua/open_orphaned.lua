-- KEYS owners, expiry, peers
-- Returns routers that have an open set and are not registered, each as incarnation/id.

local now, orphaned = now_ms(), {}
for _, router in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local incarnation, id = string.sub(router, 1, 16), string.sub(router, 18)
  local ends = redis.call('ZSCORE', KEYS[2], id)
  if not ends or tonumber(ends) <= now or redis.call('HGET', KEYS[3], 'i:' .. id) ~= incarnation then
    table.insert(orphaned, router)
  end
end
return orphaned
