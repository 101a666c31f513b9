-- Lets a new attempt at a request follow one whose workers failed: ends that one, and puts the new one where it stood
-- in the queue, before all who came after it. It is never refused for want of room: it held credit, so there are no more
-- of its kind than credit allowed. The same attempt again changes nothing.
-- ARGV: former attempt, attempt, ticket with its order as JSON, lease in ms.
-- Returns {'admitted', ...} as admit does, or {'exists'}.
local former, attempt, ticket, lease_ms = ARGV[1], ARGV[2], cjson.decode(ARGV[3]), tonumber(ARGV[4])
epoch()
end_ticket(former)
local answer = answer_to_known(ticket, attempt)
if answer then
  return answer
end
ticket.since = now
return take_in(ticket, attempt, lease_ms, true)
