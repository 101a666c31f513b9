-- Shared by all scripts. Every number of time is in ms by Redis' own clock.
local EPOCH, WORKERS, BEATS, RETIRED, CREDIT = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local TICKETS, REQUESTS, QUEUE, GRANTS, LEASES, LOAD = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local SEATS, TURNS = KEYS[12], KEYS[13]

local WORKER_TTL_MS = 2500 -- a worker without a heartbeat for so long gets nothing new
local WORKER_FORGET_MS = 60000 -- and after this its record goes
local RETIRED_MS = 600000
local SWEEP = 100 -- leases that one call ends at most
local MOST_TENANTS = 1000 -- whose queues are looked at to tell a position exactly
local HIGHEST_PRIORITY = 10
local SWEEP_GAP_MS = 2000 -- gateways sweep more often than this, unless Redis or all of them stood still

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Whole numbers as Redis writes them: Lua would turn 14 digits into an exponent.
local function int(number)
  return string.format('%.0f', number)
end

local function number(raw)
  return tonumber(raw or '0') or 0
end

-- Adds to a sum; a sum of 0 leaves no field behind.
local function add(key, field, amount)
  if amount ~= 0 and redis.call('HINCRBY', key, field, int(amount)) == 0 then
    redis.call('HDEL', key, field)
  end
end

-- The name of this life of the database, and its age.
local function epoch()
  local found = redis.call('GET', EPOCH)
  if not found then
    found = int(now) .. '-' .. clock[2]
    redis.call('SET', EPOCH, found)
  end
  return found, now - tonumber(string.match(found, '^%d+'))
end

local function is_alive(worker_id)
  local beat = redis.call('ZSCORE', BEATS, worker_id)
  return beat and now - tonumber(beat) <= WORKER_TTL_MS
end

-- All live workers: {record, age of the heartbeat, blocks, sequences and tokens to compute that grants hold} each.
local function views()
  local ids = redis.call('ZRANGEBYSCORE', BEATS, int(now - WORKER_TTL_MS), '+inf', 'WITHSCORES')
  local beats, names = {}, {}
  for i = 1, #ids, 2 do
    beats[ids[i]] = ids[i + 1]
    names[#names + 1] = ids[i]
  end
  table.sort(names)
  local rows = {}
  for i, id in ipairs(names) do
    local held = redis.call('HMGET', CREDIT, id .. ':blocks', id .. ':seqs', id .. ':tokens')
    rows[i] = {
      redis.call('HGET', WORKERS, id), now - tonumber(beats[id]), number(held[1]), number(held[2]), number(held[3]),
    }
  end
  return rows
end

-- One side of a grant, {id, incarnation, blocks, seqs, tokens, held}: charges the worker, or gives back what it holds.
local function charge(side)
  add(CREDIT, side.id .. ':blocks', side.blocks)
  add(CREDIT, side.id .. ':seqs', side.seqs or 1)
  add(CREDIT, side.id .. ':tokens', side.tokens or 0)
  side.held = true
end

local function discharge(side)
  if side.held then
    add(CREDIT, side.id .. ':blocks', -side.blocks)
    add(CREDIT, side.id .. ':seqs', -(side.seqs or 1))
    add(CREDIT, side.id .. ':tokens', -(side.tokens or 0))
    side.held = false
  end
end

-- The prefill side counts against its class's limit of prefills too.
local function end_prefill(grant)
  discharge(grant.prefill)
  if grant.counted then
    add(LOAD, 'prefills:' .. grant.class, -1)
    grant.counted = false
  end
end

-- Frees what grants hold on earlier incarnations of a worker: that memory is gone.
local function free_other_incarnations(worker_id, incarnation)
  local all = redis.call('HGETALL', GRANTS)
  for i = 1, #all, 2 do
    local grant = cjson.decode(all[i + 1])
    local changed = false
    if grant.prefill.id == worker_id and grant.prefill.incarnation ~= incarnation then
      end_prefill(grant)
      changed = true
    end
    if grant.decode.id == worker_id and grant.decode.incarnation ~= incarnation then
      discharge(grant.decode)
      changed = true
    end
    if changed then
      redis.call('HSET', GRANTS, all[i], cjson.encode(grant))
    end
  end
end

-- The queue holds 'class|tenant|rank of the priority|order|attempt': a tenant's tickets stand together, in the order
-- in which they are served. '}' is the character after '|', so it ends the range of what comes before it.
local function queue_member(ticket, attempt)
  return string.format('%s|%s|%02.0f|%016.0f|%s',
    ticket.class, ticket.tenant, HIGHEST_PRIORITY - ticket.priority, ticket.order, attempt)
end

local function num_waiting(class)
  return redis.call('ZLEXCOUNT', QUEUE, '[' .. class .. '|', '(' .. class .. '}')
end

-- The first and the last member of a set whose names begin with 'prefix|'.
local function first_of(key, prefix)
  return redis.call('ZRANGEBYLEX', key, '[' .. prefix .. '|', '(' .. prefix .. '}', 'LIMIT', 0, 1)[1]
end

local function last_of(key, prefix)
  return redis.call('ZREVRANGEBYLEX', key, '(' .. prefix .. '}', '[' .. prefix .. '|', 'LIMIT', 0, 1)[1]
end

-- A number that is greater than the one that follows 'prefix|' in the last member.
local function number_after(key, prefix)
  local last = last_of(key, prefix)
  return last and math.max(now, tonumber(string.match(string.sub(last, #prefix + 2), '^%d+')) + 1) or now
end

-- Tenants with waiting tickets take turns in the order of their seats; whoever was served, and whoever comes, takes
-- the last one. So between two turns of a tenant every other one has at most one.
local function turn_member(class, seat, tenant)
  return string.format('%s|%016.0f|%s', class, seat, tenant)
end

local function stand_up(class, tenant)
  local seat = redis.call('HGET', SEATS, class .. '|' .. tenant)
  if seat then
    redis.call('HDEL', SEATS, class .. '|' .. tenant)
    redis.call('ZREM', TURNS, turn_member(class, tonumber(seat), tenant))
  end
end

local function sit_down(class, tenant, seat)
  redis.call('HSET', SEATS, class .. '|' .. tenant, int(seat))
  redis.call('ZADD', TURNS, 0, turn_member(class, seat, tenant))
end

-- Puts a ticket in its place. One that comes back after a loss brings its tenant's turn with it.
local function enqueue(ticket, attempt, comes_back)
  local class, tenant = ticket.class, ticket.tenant
  redis.call('ZADD', QUEUE, 0, queue_member(ticket, attempt))
  add(LOAD, 'tokens:' .. class, ticket.prompt_tokens)
  add(LOAD, 'tokens:' .. class .. '|' .. tenant, ticket.prompt_tokens)
  local seat = redis.call('HGET', SEATS, class .. '|' .. tenant)
  if not seat then
    sit_down(class, tenant, comes_back and ticket.order or number_after(TURNS, class))
  elseif comes_back and ticket.order < tonumber(seat) then
    stand_up(class, tenant)
    sit_down(class, tenant, ticket.order)
  end
end

-- Takes a ticket out of the queue; whether it was there.
local function dequeue(ticket, attempt)
  if redis.call('ZREM', QUEUE, queue_member(ticket, attempt)) == 0 then
    return false
  end
  add(LOAD, 'tokens:' .. ticket.class, -ticket.prompt_tokens)
  add(LOAD, 'tokens:' .. ticket.class .. '|' .. ticket.tenant, -ticket.prompt_tokens)
  if not first_of(QUEUE, ticket.class .. '|' .. ticket.tenant) then
    stand_up(ticket.class, ticket.tenant)
  end
  return true
end

-- Ends the turn of a tenant that was served.
local function end_turn(class, tenant)
  if redis.call('HEXISTS', SEATS, class .. '|' .. tenant) == 1 then
    stand_up(class, tenant)
    sit_down(class, tenant, number_after(TURNS, class))
  end
end

-- The member of the queue that its class serves next.
local function head_member(turn)
  local class, tenant = string.match(turn, '^([^|]*)|%d+|(.*)$')
  return first_of(QUEUE, class .. '|' .. tenant), class
end

-- How many tickets are served before a waiting one if nobody comes or leaves. With more than MOST_TENANTS it is an
-- upper bound.
local function num_ahead(ticket, attempt)
  local class, own = ticket.class, ticket.tenant
  local mine = class .. '|' .. own
  local before = redis.call('ZLEXCOUNT', QUEUE, '[' .. mine .. '|', '(' .. queue_member(ticket, attempt))
  local ahead, turns = before, before + 1
  local seated = redis.call('ZRANGEBYLEX', TURNS, '[' .. class .. '|', '(' .. class .. '}', 'LIMIT', 0, MOST_TENANTS)
  for _, turn in ipairs(seated) do
    local tenant = string.match(turn, '^[^|]*|%d+|(.*)$')
    if tenant == own then
      turns = before -- who sits behind has one turn less
    elseif turns > 0 then
      local theirs = class .. '|' .. tenant
      ahead = ahead + math.min(turns, redis.call('ZLEXCOUNT', QUEUE, '[' .. theirs .. '|', '(' .. theirs .. '}'))
    end
  end
  if #seated == MOST_TENANTS then
    local unseen = redis.call('ZLEXCOUNT', TURNS, '[' .. class .. '|', '(' .. class .. '}') - MOST_TENANTS
    ahead = math.min(ahead + unseen * turns, num_waiting(class) - 1)
  end
  return ahead
end

-- How long a ticket with so many ahead waits if its class goes on as it did lately, in ms; -1 when nothing is known.
local function predicted_wait(class, ahead)
  if ahead == 0 then
    return 0
  end
  local load = redis.call('HMGET', LOAD, 'interval:' .. class, 'granted_at:' .. class)
  if not load[1] then
    return -1
  end
  local order = string.match(head_member(first_of(TURNS, class)), '^[^|]*|[^|]*|%d+|(%d+)|')
  local interval, standstill = tonumber(load[1]), now - math.max(number(load[2]), tonumber(order))
  if standstill > interval then
    interval = 0.8 * interval + 0.2 * standstill -- as if a grant came now
  end
  return math.floor(interval * ahead)
end

-- Ends a ticket whatever its state; whether there was one. Every ticket ends here and only once.
local function end_ticket(attempt)
  redis.call('ZREM', LEASES, attempt)
  local raw = redis.call('HGET', TICKETS, attempt)
  if not raw then
    return false
  end
  local ticket = cjson.decode(raw)
  redis.call('HDEL', TICKETS, attempt)
  if redis.call('HGET', REQUESTS, ticket.request_id) == attempt then
    redis.call('HDEL', REQUESTS, ticket.request_id)
  end
  local held = redis.call('HGET', GRANTS, attempt)
  if held then
    local grant = cjson.decode(held)
    end_prefill(grant)
    discharge(grant.decode)
    redis.call('HDEL', GRANTS, attempt)
  else
    dequeue(ticket, attempt)
  end
  return true
end

-- Ends what its gateway no longer renews. After a standstill every lease looks old although nobody could renew
-- it, so the gateways get a moment to do so first.
local function sweep()
  local seen = redis.call('HMGET', LOAD, 'swept', 'hold')
  redis.call('HSET', LOAD, 'swept', int(now))
  if now - number(seen[1]) > SWEEP_GAP_MS then
    redis.call('HSET', LOAD, 'hold', int(now + SWEEP_GAP_MS))
    return
  end
  if now < number(seen[2]) then
    return
  end
  for _, attempt in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', int(now), 'LIMIT', 0, SWEEP)) do
    end_ticket(attempt)
  end
end

local function is_ready(worker_id)
  return is_alive(worker_id) and cjson.decode(redis.call('HGET', WORKERS, worker_id)).state == 'ready'
end

-- The credit that is kept free for the head of a class that stood still for too long: {attempt, class, prefill and
-- decode with {id, blocks}}, at most one at a time. It ends when the ticket is no head any more or a worker has left.
local function reservation()
  local raw = redis.call('HGET', LOAD, 'reserved')
  if not raw then
    return nil
  end
  local kept = cjson.decode(raw)
  local seated = first_of(TURNS, kept.class)
  local member = seated and head_member(seated)
  if member and string.sub(member, -#kept.attempt - 1) == '|' .. kept.attempt
    and is_ready(kept.prefill.id) and is_ready(kept.decode.id) then
    return kept
  end
  redis.call('HDEL', LOAD, 'reserved')
  return nil
end

-- For how long a class has granted nothing though somebody waited.
local function standstill(class, ticket)
  return now - math.max(number(redis.call('HGET', LOAD, 'granted_at:' .. class)), ticket.since)
end

-- The ticket that each class serves next: {attempt, ticket, prefills of the class now, its place in the turns, how long
-- the class has stood still} each.
local function heads()
  local rows = {}
  local clock_of_turns = number(redis.call('HGET', LOAD, 'turn'))
  local from = '-'
  while true do
    local seated = redis.call('ZRANGEBYLEX', TURNS, from, '+', 'LIMIT', 0, 1)[1]
    if not seated then
      return rows
    end
    local member, class = head_member(seated)
    local attempt = string.match(member, '^[^|]*|[^|]*|%d+|%d+|(.*)$')
    local load = redis.call('HMGET', LOAD, 'prefills:' .. class, 'turn:' .. class)
    local turn = math.max(clock_of_turns, number(load[2]))
    local raw = redis.call('HGET', TICKETS, attempt)
    rows[#rows + 1] = {
      attempt, raw, number(load[1]), string.format('%.6f', turn), standstill(class, cjson.decode(raw)),
    }
    from = '(' .. class .. '}'
  end
end

-- What routing needs: the heads, the workers, the time in us, by which the newer of two is known, and what is kept.
local function snapshot()
  local kept = reservation()
  return {heads(), views(), int(clock[1] * 1000000 + clock[2]), kept and cjson.encode(kept) or ''}
end

-- The same, or nothing when nobody waits.
local function snapshot_if_waiting()
  if redis.call('ZCARD', QUEUE) == 0 then
    return {}
  end
  return snapshot()
end

-- What the owner of a ticket that is in the queue, or was granted since, is told of its admission.
local function admitted(ticket, attempt)
  local ahead = redis.call('HEXISTS', GRANTS, attempt) == 1 and 0 or num_ahead(ticket, attempt)
  local wait_ms = predicted_wait(ticket.class, ahead)
  return {'admitted', ahead, int(ticket.order), int(ticket.since), wait_ms, ahead == 0 and snapshot() or {}}
end

-- The answer to an admission that needs no new ticket, because the attempt has one or its request runs; else nil.
local function answer_to_known(ticket, attempt)
  local known = redis.call('HGET', TICKETS, attempt)
  if known then
    return admitted(cjson.decode(known), attempt)
  end
  if redis.call('HEXISTS', REQUESTS, ticket.request_id) == 1 then
    return {'exists'}
  end
end

-- Makes an attempt's ticket, under a lease, and puts it into the queue; `enqueue` tells of `comes_back`.
local function take_in(ticket, attempt, lease_ms, comes_back)
  redis.call('HSET', TICKETS, attempt, cjson.encode(ticket))
  redis.call('HSET', REQUESTS, ticket.request_id, attempt)
  redis.call('ZADD', LEASES, int(now + lease_ms), attempt)
  enqueue(ticket, attempt, comes_back)
  return admitted(ticket, attempt)
end

-- What the owner of a ticket is told of its grant; nil when a worker is gone or was replaced since.
local function grant_message(attempt, ticket, grant)
  local prefill = redis.call('HGET', WORKERS, grant.prefill.id)
  local decode = redis.call('HGET', WORKERS, grant.decode.id)
  if not prefill or cjson.decode(prefill).incarnation ~= grant.prefill.incarnation
    or not decode or cjson.decode(decode).incarnation ~= grant.decode.incarnation then
    return nil
  end
  return cjson.encode({
    attempt_id = attempt, gateway = ticket.gateway, prefill = prefill, decode = decode,
    prefill_blocks = grant.prefill.blocks, decode_blocks = grant.decode.blocks, prefill_tokens = grant.prefill.tokens or 0,
    queue_ms = grant.queue_ms,
  })
end

