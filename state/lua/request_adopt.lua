-- Makes a router the owner of a request that hasn't ended, in a new epoch. Where it owns it already nothing changes.
-- To cancel it is to become its owner and end it by one step, so that whoever is superseded by that learns why; the
-- snapshot shows what was cancelled, the record of the end is for the new owner to write.
-- KEYS request, journal, logprobs   ARGV router, open_ms, the epoch that is taken over or '', ended_ms to cancel or ''
-- Without an epoch it is for a client's new stream: `stream_epoch` keeps the last epoch that began so.
-- Returns {'unknown'}, {'superseded', epoch, owner, state, stream_epoch} when that epoch is over, or
-- {'exists', snapshot, owner before}.

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
local shown = {'exists', snapshot(KEYS[1], KEYS[2], KEYS[3], 0), owner}
if state < FIRST_END and ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'state', CANCELLED)
  keep(ARGV[4], unpack(KEYS))
end
return shown
