-- Counts everything again from tickets and grants. Returns one line for each thing that differs.
local faults, expected = {}, {[CREDIT] = {}, [LOAD] = {}}

local function fault(...)
  faults[#faults + 1] = table.concat({...}, ' ')
end

local function expect(key, field, amount)
  expected[key][field] = (expected[key][field] or 0) + amount
end

local function entries(key)
  local flat, rows = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    rows[flat[i]] = flat[i + 1]
  end
  return rows
end

local function compare(key, is_sum)
  local found = entries(key)
  for field, value in pairs(found) do
    if is_sum(field) and tonumber(value) ~= expected[key][field] then
      fault(field, 'is', value, 'but should be', tostring(expected[key][field] or 'absent'))
    end
  end
  for field, amount in pairs(expected[key]) do
    if is_sum(field) and amount ~= 0 and not found[field] then
      fault(field, 'is absent but should be', tostring(amount))
    end
  end
end

local tickets, grants = entries(TICKETS), entries(GRANTS)
local num_queued, num_tickets, num_seats = 0, 0, 0
local seats, is_seated = entries(SEATS), {}
for attempt, raw in pairs(tickets) do
  local ticket = cjson.decode(raw)
  num_tickets = num_tickets + 1
  local is_queued = redis.call('ZSCORE', QUEUE, queue_member(ticket, attempt))
  if (is_queued and true or false) == (grants[attempt] ~= nil) then
    fault('ticket', attempt, is_queued and 'waits and is granted' or 'neither waits nor is granted')
  end
  if is_queued then
    num_queued = num_queued + 1
    expect(LOAD, 'tokens:' .. ticket.class, ticket.prompt_tokens)
    expect(LOAD, 'tokens:' .. ticket.class .. '|' .. ticket.tenant, ticket.prompt_tokens)
    local name = ticket.class .. '|' .. ticket.tenant
    local turn = seats[name] and turn_member(ticket.class, tonumber(seats[name]), ticket.tenant)
    if not turn or not redis.call('ZSCORE', TURNS, turn) then
      fault('tenant', name, 'waits and has no turn')
    elseif not is_seated[name] then
      is_seated[name], num_seats = true, num_seats + 1
    end
  end
  if not redis.call('ZSCORE', LEASES, attempt) then
    fault('ticket', attempt, 'has no lease')
  end
end
for attempt, raw in pairs(grants) do
  local grant = cjson.decode(raw)
  if not tickets[attempt] then
    fault('grant', attempt, 'has no ticket')
  end
  if grant.counted then
    expect(LOAD, 'prefills:' .. grant.class, 1)
  end
  for _, worker in ipairs({grant.prefill, grant.decode}) do
    if worker.held then
      expect(CREDIT, worker.id .. ':blocks', worker.blocks)
      expect(CREDIT, worker.id .. ':seqs', worker.seqs or 1)
      expect(CREDIT, worker.id .. ':tokens', worker.tokens or 0)
    end
  end
end
for request_id, attempt in pairs(entries(REQUESTS)) do
  if not tickets[attempt] then
    fault('request', request_id, 'has no ticket')
  end
end
if redis.call('ZCARD', QUEUE) ~= num_queued then
  fault('the queue holds members without a ticket')
end
if redis.call('HLEN', SEATS) ~= num_seats or redis.call('ZCARD', TURNS) ~= num_seats then
  fault('there are turns of tenants who do not wait')
end
if redis.call('ZCARD', LEASES) ~= num_tickets then
  fault('there are leases without a ticket')
end
compare(CREDIT, function(field)
  return string.find(field, ':blocks$') or string.find(field, ':seqs$') or string.find(field, ':tokens$')
end)
compare(LOAD, function(field)
  return string.find(field, '^tokens:') or string.find(field, '^prefills:')
end)
return faults
