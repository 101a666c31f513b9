-- Gives a pair of workers to the head of a class, if it still is the head and both still have the credit.
-- ARGV: attempt, prefill id, decode id, prefill blocks, decode blocks, most prefills of the class (-1: no bound),
-- weight of the class, settling time in ms, the granting gateway, prefix of the gateways' channels, tokens that the
-- prefill worker is to compute.
-- Returns {status, snapshot, message for the ticket's owner when granted}.
local attempt, prefill_id, decode_id = ARGV[1], ARGV[2], ARGV[3]
local prefill_blocks, decode_blocks = tonumber(ARGV[4]), tonumber(ARGV[5])
local max_prefills, weight, settle_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

-- In a new database the grants of other gateways may still be missing from the sums.
local _, age_ms = epoch()
if age_ms < settle_ms then
  return {'settling', {}}
end

local raw = redis.call('HGET', TICKETS, attempt)
if not raw then
  return {'stale', snapshot_if_waiting()}
end
local ticket = cjson.decode(raw)
local earlier = redis.call('HGET', GRANTS, attempt)
if earlier then
  local message = grant_message(attempt, ticket, cjson.decode(earlier))
  return {message and 'granted' or 'stale', snapshot_if_waiting(), message}
end
if ticket.max_wait_ms and now > ticket.since + ticket.max_wait_ms then
  end_ticket(attempt) -- nobody waits for it any more
  return {'stale', snapshot_if_waiting()}
end
local class = ticket.class
local seated = first_of(TURNS, class)
if not seated or head_member(seated) ~= queue_member(ticket, attempt) then
  return {'stale', snapshot_if_waiting()}
end
if max_prefills >= 0 and number(redis.call('HGET', LOAD, 'prefills:' .. class)) >= max_prefills then
  return {'prefills', snapshot_if_waiting()}
end

-- One side of the grant when the worker can take it, and what is kept for another ticket beside it.
local kept = reservation()
local function side(id, role, blocks, seqs, tokens)
  local record = is_alive(id) and cjson.decode(redis.call('HGET', WORKERS, id))
  if not record or record.role ~= role or record.state ~= 'ready' then
    return nil
  end
  local held = redis.call('HMGET', CREDIT, id .. ':blocks', id .. ':seqs')
  local is_kept = kept and kept.attempt ~= attempt and kept[role].id == id
  local kept_blocks, kept_seqs = is_kept and kept[role].blocks or 0, is_kept and (kept[role].seqs or 1) or 0
  if number(held[1]) + kept_blocks + blocks > record.num_blocks
    or number(held[2]) + kept_seqs + seqs > record.max_num_seqs then
    return nil
  end
  return {id = id, incarnation = record.incarnation, blocks = blocks, seqs = seqs, tokens = tokens}
end

local prefill = side(prefill_id, 'prefill', prefill_blocks, 1, tonumber(ARGV[11]))
local decode = side(decode_id, 'decode', decode_blocks, ticket.num_choices or 1, 0)
if not prefill or not decode then
  return {'credit', snapshot_if_waiting()}
end

if kept and kept.attempt == attempt then
  redis.call('HDEL', LOAD, 'reserved')
end
dequeue(ticket, attempt)
end_turn(class, ticket.tenant)
charge(prefill)
charge(decode)
add(LOAD, 'prefills:' .. class, 1)
local grant = {class = class, prefill = prefill, decode = decode, counted = true, queue_ms = now - ticket.since}
redis.call('HSET', GRANTS, attempt, cjson.encode(grant))

-- Fair turns: a class's next turn comes 1 / weight after this one; who was idle or blocked has no claim on the past.
local load = redis.call('HMGET', LOAD, 'turn', 'turn:' .. class, 'granted_at:' .. class, 'interval:' .. class)
local turn = math.max(number(load[1]), number(load[2]))
-- How fast the class's queue moves, without the time in which nobody waited.
local interval = now - math.max(number(load[3]), ticket.since)
if load[4] then
  interval = 0.8 * tonumber(load[4]) + 0.2 * interval
end
redis.call('HSET', LOAD,
  'turn', string.format('%.6f', turn), 'turn:' .. class, string.format('%.6f', turn + 1 / weight),
  'granted_at:' .. class, int(now), 'interval:' .. class, string.format('%.3f', interval))

local message = grant_message(attempt, ticket, grant)
if ticket.gateway ~= ARGV[9] then
  redis.call('PUBLISH', ARGV[10] .. ticket.gateway, message)
end
return {'granted', snapshot_if_waiting(), message}
