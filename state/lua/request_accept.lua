-- Stores a new request, or returns the one that has its id. Replaces an equal request that failed without a token:
-- the new one starts in a greater epoch.
-- KEYS request, journal, logprobs if requested
-- ARGV owner, digest, record, payload, open_ms, minimum epoch
-- Returns {'new', epoch}, {'differs'} (the id has another payload) or {'exists', snapshot}.

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
