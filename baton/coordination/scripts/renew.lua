-- Renews the leases of a gateway's tickets, then ends those that nobody renewed, of any gateway.
-- ARGV: lease in ms, then for each ticket its attempt and 1 when the gateway knows of no grant, else 0.
-- Returns {attempts that are not known, messages of grants, attempts whose granted worker is gone, snapshot}.
local expiry = int(now + tonumber(ARGV[1]))
epoch()
local unknown, messages, lost = {}, {}, {}
for i = 2, #ARGV, 2 do
  local attempt = ARGV[i]
  local raw = redis.call('HGET', TICKETS, attempt)
  if not raw then
    unknown[#unknown + 1] = attempt
  else
    redis.call('ZADD', LEASES, expiry, attempt)
    local grant = ARGV[i + 1] == '1' and redis.call('HGET', GRANTS, attempt)
    if grant then
      local message = grant_message(attempt, cjson.decode(raw), cjson.decode(grant))
      if message then
        messages[#messages + 1] = message
      else
        lost[#lost + 1] = attempt
      end
    end
  end
end
sweep()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', BEATS, '-inf', int(now - WORKER_FORGET_MS))) do
  redis.call('HDEL', WORKERS, id)
  redis.call('ZREM', BEATS, id)
end
return {unknown, messages, lost, snapshot()}
