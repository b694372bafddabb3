-- Takes an id for a payload, or shows what has it.
-- KEYS request, journal, logprobs where they were asked for   ARGV owner, digest, record, payload, open_ms
-- Returns {'new'}, {'differs'} (taken by another payload) or {'exists', snapshot}.

local digest = redis.call('HGET', KEYS[1], 'digest')
if digest then
  if digest ~= ARGV[2] then
    return {'differs'}
  end
  return {'exists', snapshot(KEYS[1], KEYS[2], KEYS[3], 0)}
end
redis.call('HSET', KEYS[1], 'epoch', 1, 'attempt', 1, 'state', 1, 'owner', ARGV[1], 'digest', ARGV[2],
  'record', ARGV[3], 'payload', ARGV[4])
keep(ARGV[5], KEYS[1])
return {'new'}
