-- Acquires a lease for a request in flight and charges its tokens, both or neither; renews an existing lease.
-- The token bucket is one number: the time when it is full again. Each token moves that by 60 s / rate.
-- KEYS in flight, charged, full_at   ARGV request, tokens, lease_ms, maximum in flight or '', tokens per minute or ''
-- Returns {'acquired', 1 if the lease is new}, {'in_flight', number now} or {'tokens', tokens in use, ms to wait}.

local MINUTE = 60000000
local request, tokens, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, rate = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_us()
local now_in_ms = math.floor(now / 1000)

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_in_ms)) do
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_in_ms)

local new = 0
if not redis.call('ZSCORE', KEYS[1], request) then
  new = 1
  local running = redis.call('ZCARD', KEYS[1])
  if most and running >= most then
    return {'in_flight', running}
  end
  if rate then
    local used = math.max(0, tonumber(redis.call('GET', KEYS[3]) or 0) - now)
    local cost = math.floor(tokens * MINUTE / rate)
    if used > 0 and used + cost > MINUTE then -- a full bucket admits any request: a large one must not wait for ever
      local wait = used - math.max(0, MINUTE - cost)
      return {'tokens', math.ceil(used * rate / MINUTE), math.ceil(wait / 1000)}
    end
    redis.call('SET', KEYS[3], integer(now + used + cost), 'PX', math.ceil((used + cost) / 1000) + 1)
  end
  redis.call('HSET', KEYS[2], request, tokens)
end
redis.call('ZADD', KEYS[1], integer(now_in_ms + lease), request)
keep(lease, KEYS[1], KEYS[2])
return {'acquired', new}
