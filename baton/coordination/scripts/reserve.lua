-- Keeps what becomes free on a pair of workers for the head of a class that has stood still, unless something is kept
-- already. ARGV: attempt, prefill id, decode id, prefill blocks, decode blocks, least standstill in ms.
-- Returns a snapshot.
local attempt, least_ms = ARGV[1], tonumber(ARGV[6])
local raw = redis.call('HGET', TICKETS, attempt)
if raw and not reservation() then
  local ticket = cjson.decode(raw)
  local seated = first_of(TURNS, ticket.class)
  local is_head = seated and head_member(seated) == queue_member(ticket, attempt)
  if is_head and standstill(ticket.class, ticket) >= least_ms and is_ready(ARGV[2]) and is_ready(ARGV[3]) then
    redis.call('HSET', LOAD, 'reserved', cjson.encode({
      attempt = attempt, class = ticket.class,
      prefill = {id = ARGV[2], blocks = tonumber(ARGV[4])}, decode = {id = ARGV[3], blocks = tonumber(ARGV[5]), seqs = ticket.num_choices},
    }))
  end
end
return snapshot_if_waiting()
