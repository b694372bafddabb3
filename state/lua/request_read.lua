-- KEYS request, journal, logprobs   ARGV first entry
-- Returns {'unknown'} or {'exists', snapshot}.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'unknown'}
end
return {'exists', snapshot(KEYS[1], KEYS[2], KEYS[3], tonumber(ARGV[1]))}
