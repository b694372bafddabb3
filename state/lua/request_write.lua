-- Keeps the greater of what is stored and what is written. A whole write carries the payload and all entries; any
-- other builds on what this epoch's owner has written before.
-- KEYS request, journal
-- ARGV owner, epoch, attempt, state, base, entries, record, open_ms, ended_ms, then digest and payload of a whole one
-- Returns {'written', entries now}, {'superseded', epoch, owner}, {'behind', entries now} when the journal ends before
-- `base`, {'incomplete'} when only a whole write can be kept. Only 'written' has written.

local owner, epoch, attempt, state = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local base, entries = tonumber(ARGV[5]), ARGV[6]
local whole = #ARGV > 9

local function lifetime()
  if state >= FIRST_END then
    return ARGV[9]
  end
  return ARGV[8]
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'attempt', 'state', 'owner')
local old_epoch, old_attempt, old_state, old_owner = tonumber(found[1]), tonumber(found[2]), tonumber(found[3]), found[4]

if not old_epoch or epoch > old_epoch then
  if not whole then
    return {'incomplete'}
  end
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', attempt, 'state', state, 'owner', owner,
    'record', ARGV[7], 'digest', ARGV[10], 'payload', ARGV[11])
  redis.call('APPEND', KEYS[2], entries)
  keep(lifetime(), KEYS[1], KEYS[2])
  return {'written', #entries / ENTRY}
end

-- Two routers hold the same epoch only where Redis lost an adoption: the first that is stored stays.
if epoch < old_epoch or owner ~= old_owner or attempt < old_attempt then
  return {'superseded', old_epoch, old_owner}
end

-- One owner writes one sequence of entries, so those that are stored already are equal.
local length = redis.call('STRLEN', KEYS[2]) / ENTRY
if length < base then
  return {'behind', length}
end
local last = base + #entries / ENTRY
if last > length then
  redis.call('APPEND', KEYS[2], string.sub(entries, (length - base) * ENTRY + 1))
end

local newer = attempt > old_attempt or rank(state) > rank(old_state)
if newer or (state == old_state and last >= length) then
  redis.call('HSET', KEYS[1], 'attempt', attempt, 'state', state, 'record', ARGV[7])
  if newer or state < FIRST_END then
    keep(lifetime(), KEYS[1], KEYS[2])
  end
end
return {'written', math.max(last, length)}
