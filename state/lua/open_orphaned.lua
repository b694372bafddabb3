-- KEYS owners, expiry, peers
-- Returns the lives that have an open set and are not registered. A life reads incarnation/id.

local now, orphaned = now_ms(), {}
for _, life in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local incarnation, id = string.sub(life, 1, 16), string.sub(life, 18)
  local ends = redis.call('ZSCORE', KEYS[2], id)
  if not ends or tonumber(ends) <= now or redis.call('HGET', KEYS[3], 'i:' .. id) ~= incarnation then
    table.insert(orphaned, life)
  end
end
return orphaned
