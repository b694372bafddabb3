-- Takes an id for a payload, or shows what has it. An equal request that failed before it wrote anything makes room:
-- the new one begins in a greater epoch.
-- KEYS request, journal, logprobs where they were asked for
-- ARGV owner, digest, record, payload, open_ms, the least epoch to begin in
-- Returns {'new', epoch}, {'differs'} (taken by another payload) or {'exists', snapshot}.

local found = redis.call('HMGET', KEYS[1], 'digest', 'epoch', 'state')
local digest, epoch, state = found[1], tonumber(found[2]), tonumber(found[3])
if digest then
  if digest ~= ARGV[2] then
    return {'differs'}
  end
  if state ~= FAILED or redis.call('EXISTS', KEYS[2]) == 1 then
    return {'exists', snapshot(KEYS[1], KEYS[2], KEYS[3], 0)}
  end
  redis.call('DEL', KEYS[1])
end
epoch = math.max((epoch or 0) + 1, tonumber(ARGV[6]))
redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', 1, 'state', 1, 'owner', ARGV[1], 'digest', ARGV[2],
  'record', ARGV[3], 'payload', ARGV[4])
keep(ARGV[5], KEYS[1])
return {'new', epoch}
