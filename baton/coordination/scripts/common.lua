-- Shared by all scripts. Every number of time is in ms by Redis' own clock.
local EPOCH, WORKERS, BEATS, RETIRED, CREDIT = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local TICKETS, REQUESTS, QUEUE, GRANTS, LEASES, LOAD = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]

local WORKER_TTL_MS = 2500 -- a worker without a heartbeat for so long gets nothing new
local WORKER_FORGET_MS = 60000 -- and after this its record goes
local RETIRED_MS = 600000
local SWEEP = 100 -- leases that one call ends at most
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

-- All live workers: {record, age of the heartbeat, blocks and sequences that grants hold} each.
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
    local held = redis.call('HMGET', CREDIT, id .. ':blocks', id .. ':seqs')
    rows[i] = {redis.call('HGET', WORKERS, id), now - tonumber(beats[id]), number(held[1]), number(held[2])}
  end
  return rows
end

-- One side of a grant, {id, incarnation, blocks, held}: charges the worker, or gives back what it holds.
local function charge(side)
  add(CREDIT, side.id .. ':blocks', side.blocks)
  add(CREDIT, side.id .. ':seqs', 1)
  side.held = true
end

local function discharge(side)
  if side.held then
    add(CREDIT, side.id .. ':blocks', -side.blocks)
    add(CREDIT, side.id .. ':seqs', -1)
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

-- The queue holds 'class|order|attempt'. '}' is the character after '|', so it ends a class's range.
local function queue_member(ticket, attempt)
  return ticket.class .. '|' .. string.format('%016.0f', ticket.order) .. '|' .. attempt
end

local function num_waiting(class)
  return redis.call('ZLEXCOUNT', QUEUE, '[' .. class .. '|', '(' .. class .. '}')
end

-- Takes a ticket out of the queue; whether it was there.
local function dequeue(ticket, attempt)
  if redis.call('ZREM', QUEUE, queue_member(ticket, attempt)) == 1 then
    add(LOAD, 'tokens:' .. ticket.class, -ticket.prompt_tokens)
    return true
  end
  return false
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

-- The first waiting ticket of each class: {attempt, ticket, prefills of the class now, its place in the turns} each.
local function heads()
  local rows = {}
  local clock_of_turns = number(redis.call('HGET', LOAD, 'turn'))
  local from = '-'
  while true do
    local member = redis.call('ZRANGEBYLEX', QUEUE, from, '+', 'LIMIT', 0, 1)[1]
    if not member then
      return rows
    end
    local class, attempt = string.match(member, '^([^|]*)|%d+|(.*)$')
    local load = redis.call('HMGET', LOAD, 'prefills:' .. class, 'turn:' .. class)
    local turn = math.max(clock_of_turns, number(load[2]))
    rows[#rows + 1] = {attempt, redis.call('HGET', TICKETS, attempt), number(load[1]), string.format('%.6f', turn)}
    from = '(' .. class .. '}'
  end
end

-- What routing needs: the heads, the workers, and the time in us, by which the newer of two is known.
local function snapshot()
  return {heads(), views(), int(clock[1] * 1000000 + clock[2])}
end

-- The same, or nothing when nobody waits.
local function snapshot_if_waiting()
  if redis.call('ZCARD', QUEUE) == 0 then
    return {}
  end
  return snapshot()
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
    prefill_blocks = grant.prefill.blocks, decode_blocks = grant.decode.blocks, queue_ms = grant.queue_ms,
  })
end

