-- Puts tickets back that Redis has lost: waiting ones at their old place, granted ones with what they hold, even
-- beyond a worker's credit, since they run. Tickets that are known stay as they are.
-- ARGV: lease in ms, JSON list of {attempt_id, ticket, grant or nothing}.
epoch()
local expiry = int(now + tonumber(ARGV[1]))

-- Charges a side unless its worker has restarted since, which freed it.
local function recharge(worker)
  local record = redis.call('HGET', WORKERS, worker.id)
  if worker.held and (not record or cjson.decode(record).incarnation == worker.incarnation) then
    charge(worker)
  else
    worker.held = false
  end
end

for _, entry in ipairs(cjson.decode(ARGV[2])) do
  local attempt, ticket, grant = entry.attempt_id, entry.ticket, entry.grant
  if redis.call('HEXISTS', TICKETS, attempt) == 0 then
    redis.call('HSET', TICKETS, attempt, cjson.encode(ticket))
    redis.call('HSETNX', REQUESTS, ticket.request_id, attempt)
    redis.call('ZADD', LEASES, expiry, attempt)
    if grant then
      recharge(grant.prefill)
      recharge(grant.decode)
      grant.counted = grant.prefill.held
      if grant.counted then
        add(LOAD, 'prefills:' .. grant.class, 1)
      end
      redis.call('HSET', GRANTS, attempt, cjson.encode(grant))
    else
      enqueue(ticket, attempt, true)
    end
  end
end
return 1
