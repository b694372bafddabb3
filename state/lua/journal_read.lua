-- KEYS request, journal   ARGV first entry wanted, most entries wanted
-- Returns {'unknown'} or {'exists', entries now, the wanted ones}.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'unknown'}
end
local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])
return {
  'exists', redis.call('STRLEN', KEYS[2]) / ENTRY,
  redis.call('GETRANGE', KEYS[2], first * ENTRY, (first + most) * ENTRY - 1),
}
