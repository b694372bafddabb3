-- KEYS request, journal   ARGV first entry, maximum number of entries
-- Returns {'unknown'} or {'exists', number of entries in the journal, these entries}.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'unknown'}
end
local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])
return {
  'exists', redis.call('STRLEN', KEYS[2]) / ENTRY,
  redis.call('GETRANGE', KEYS[2], first * ENTRY, (first + most) * ENTRY - 1),
}
