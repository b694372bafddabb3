-- Prefix of every other script. States are ordered numbers; those from SUCCEEDED on are ends.

local FIRST_END = 5
local FAILED = 6
local CANCELLED = 7
local ENTRY = 4 -- bytes of a journal's entry

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- Integer as text: Lua formats a large one as 1.7e+15.
local function integer(number)
  return string.format('%.0f', number)
end

-- All ends have one rank: none is later than another.
local function rank(state)
  return math.min(state, FIRST_END)
end

local function keep(milliseconds, ...)
  for _, key in ipairs({...}) do
    redis.call('PEXPIRE', key, milliseconds)
  end
end

-- Removes a result from the index. The first command only frees memory: a full Redis permits the others after it.
local function forget_result(ended, bytes, request)
  redis.call('ZREM', ended, request)
  local size = redis.call('HGET', bytes, request)
  if size then
    redis.call('HDEL', bytes, request)
    redis.call('HINCRBY', bytes, 'total', '-' .. size)
  end
end

-- Returns epoch, attempt, state, owner, stream_epoch, record, payload, ms until it expires, number of journal entries,
-- entries from `from` on; with `logprobs` (a key) the prompt's logprobs and the output's.
local function snapshot(request, journal, logprobs, from)
  local fields = redis.call('HMGET', request, 'epoch', 'attempt', 'state', 'owner', 'stream_epoch', 'record', 'payload')
  local reply = {
    tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3]), fields[4], tonumber(fields[5] or 0), fields[6], fields[7],
    redis.call('PTTL', request), redis.call('STRLEN', journal) / ENTRY,
    redis.call('GETRANGE', journal, from * ENTRY, -1),
  }
  if logprobs then
    table.insert(reply, redis.call('HGET', request, 'prompt_logprobs') or '')
    table.insert(reply, redis.call('GET', logprobs) or '')
  end
  return reply
end
