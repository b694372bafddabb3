-- Stands before every other script. Numbers of states are ordered; from SUCCEEDED on they are ends.

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

-- An integer as Redis stores it: Lua would write a large one as 1.7e+15.
local function integer(number)
  return string.format('%.0f', number)
end

-- Ends differ, but none is later than another.
local function rank(state)
  return math.min(state, FIRST_END)
end

local function keep(milliseconds, ...)
  for _, key in ipairs({...}) do
    redis.call('PEXPIRE', key, milliseconds)
  end
end

-- All of a request: epoch, attempt, state, owner, stream_epoch, record, payload, ms until it expires, entries in the journal,
-- those from `from` on; the prompt's logprobs and the output's, if the key of the latter is given.
local function snapshot(request, journal, logprobs, from)
  local found = redis.call('HMGET', request, 'epoch', 'attempt', 'state', 'owner', 'stream_epoch', 'record', 'payload')
  local shown = {
    tonumber(found[1]), tonumber(found[2]), tonumber(found[3]), found[4], tonumber(found[5] or 0), found[6], found[7],
    redis.call('PTTL', request), redis.call('STRLEN', journal) / ENTRY,
    redis.call('GETRANGE', journal, from * ENTRY, -1),
  }
  if logprobs then
    table.insert(shown, redis.call('HGET', request, 'prompt_logprobs') or '')
    table.insert(shown, redis.call('GET', logprobs) or '')
  end
  return shown
end
