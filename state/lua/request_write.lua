-- Keeps the later of the stored request and the written one. A whole write has the payload and all entries; any other
-- continues what the owner has written in this epoch.
-- KEYS request, journal, then logprobs if any were requested
-- ARGV owner, epoch, attempt, state, base, entries, record, open_ms, ended_ms,
--      with the third key: bytes of one entry's logprobs or 0, logprobs of the entries, the prompt's or '',
--      of a whole write: digest, payload
-- Returns {'written', number of entries, bytes in memory if it has ended or 0}, {'superseded', epoch, owner, state, stream_epoch}, {'behind', number of entries}
-- if the journal ends before `base`, {'incomplete'} if a whole write is needed, {'differs'} if a request with another
-- payload has the id. Writes nothing but for 'written'.

local owner, epoch, attempt, state = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local base, entries = tonumber(ARGV[5]), ARGV[6]
local last = base + #entries / ENTRY
local has_logprobs = #KEYS > 2
local size = has_logprobs and tonumber(ARGV[10]) or 0
local digest = has_logprobs and 13 or 10 -- index in ARGV
local whole = #ARGV >= digest

local function lifetime()
  if state >= FIRST_END then
    return ARGV[9]
  end
  return ARGV[8]
end

local function count(key, bytes_each)
  return redis.call('STRLEN', key) / bytes_each
end

local function append(key, length, bytes_each, bytes)
  if last > length then
    redis.call('APPEND', key, string.sub(bytes, (length - base) * bytes_each + 1))
  end
end

-- The keys have `length` entries and `logprobs` entries.
local function append_all(length, logprobs)
  append(KEYS[2], length, ENTRY, entries)
  if size > 0 then
    append(KEYS[3], logprobs, size, ARGV[11])
  end
  if has_logprobs and ARGV[12] ~= '' then
    redis.call('HSET', KEYS[1], 'prompt_logprobs', ARGV[12])
  end
end

local function bytes_if_ended()
  local bytes = 0
  for _, key in ipairs(state >= FIRST_END and KEYS or {}) do
    bytes = bytes + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) or 0)
  end
  return bytes
end

local found = redis.call('HMGET', KEYS[1], 'epoch', 'attempt', 'state', 'owner', 'stream_epoch', 'digest')
local old_epoch, old_attempt, old_state, old_owner = tonumber(found[1]), tonumber(found[2]), tonumber(found[3]), found[4]

-- Two routers accepted the id while Redis was unavailable: the stored payload keeps it.
if whole and old_epoch and found[6] ~= ARGV[digest] then
  return {'differs'}
end

if not old_epoch or epoch > old_epoch then
  if not whole then
    return {'incomplete'}
  end
  redis.call('DEL', unpack(KEYS))
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', attempt, 'state', state, 'owner', owner,
    'record', ARGV[7], 'digest', ARGV[digest], 'payload', ARGV[digest + 1])
  append_all(0, 0)
  keep(lifetime(), unpack(KEYS))
  return {'written', last, bytes_if_ended()}
end

-- Two routers have the same epoch only if Redis lost an adoption: the first that is stored stays the owner.
if epoch < old_epoch or owner ~= old_owner or attempt < old_attempt then
  return {'superseded', old_epoch, old_owner, old_state, tonumber(found[5] or 0)}
end

-- One owner writes one sequence of entries, so the stored ones are equal.
local length = count(KEYS[2], ENTRY)
local logprobs = size > 0 and count(KEYS[3], size) or length
if length < base or logprobs < base then
  return {'behind', length}
end
append_all(length, logprobs)

local newer = attempt > old_attempt or rank(state) > rank(old_state)
if newer or (state == old_state and last >= length) then
  redis.call('HSET', KEYS[1], 'attempt', attempt, 'state', state, 'record', ARGV[7])
  if newer or state < FIRST_END then
    keep(lifetime(), unpack(KEYS))
  end
end
return {'written', math.max(last, length), bytes_if_ended()}
