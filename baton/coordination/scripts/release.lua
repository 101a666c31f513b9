-- Gives back what tickets hold. Again, or for tickets that ended, it changes nothing.
-- ARGV: 'prefill' (only the prefill worker's credit) or 'all', then attempts. Returns a snapshot when somebody waits.
for i = 2, #ARGV do
  if ARGV[1] == 'all' then
    end_ticket(ARGV[i])
  else
    local raw = redis.call('HGET', GRANTS, ARGV[i])
    if raw then
      local grant = cjson.decode(raw)
      end_prefill(grant)
      redis.call('HSET', GRANTS, ARGV[i], cjson.encode(grant))
    end
  end
end
return snapshot_if_waiting()
