-- Makes a router the owner of an unfinished request, in a new epoch. No effect if it is the owner.
-- A cancel also ends the request in the same step, so that the previous owner learns why; the snapshot is of the time
-- before, and the new owner writes the record of the end.
-- KEYS request, journal, logprobs   ARGV router, open_ms, expected epoch or '', ended_ms to cancel or ''
-- Without an expected epoch the adoption is for a client's new stream: `stream_epoch` is the last such epoch.
-- Returns {'unknown'}, {'superseded', epoch, owner, state, stream_epoch} if the epoch is another one, or
-- {'exists', snapshot, previous owner}.

local found = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'owner', 'stream_epoch')
local epoch, state, owner = tonumber(found[1]), tonumber(found[2]), found[3]
if not epoch then
  return {'unknown'}
end
if state < FIRST_END and owner ~= ARGV[1] then
  if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= epoch then
    return {'superseded', epoch, owner, state, tonumber(found[4] or 0)}
  end
  redis.call('HSET', KEYS[1], 'epoch', epoch + 1, 'owner', ARGV[1])
  if ARGV[3] == '' then
    redis.call('HSET', KEYS[1], 'stream_epoch', epoch + 1)
  end
  keep(ARGV[2], unpack(KEYS))
end
local reply = {'exists', snapshot(KEYS[1], KEYS[2], KEYS[3], 0), owner}
if state < FIRST_END and ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'state', CANCELLED)
  keep(ARGV[4], unpack(KEYS))
end
return reply
