-- Puts a ticket into its class's queue. The same attempt again changes nothing.
-- ARGV: attempt, ticket as JSON, lease in ms, most waiting, most waiting tokens, settling time in ms.
-- Returns {'admitted', position, order, since, predicted wait in ms or -1, snapshot when it is the head}, {'exists'},
-- {'settling', for how many ms}, {'late', predicted wait in ms}, or
-- {'full', 'requests' or 'tokens', how many wait, after how many ms to retry}.
local DEFAULT_INTERVAL_MS = 1000
local attempt, ticket = ARGV[1], cjson.decode(ARGV[2])
local lease_ms, max_waiting, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local class, settle_ms = ticket.class, tonumber(ARGV[6])
local _, age_ms = epoch()

local answer = answer_to_known(ticket, attempt)
if answer then
  return answer
end
-- A lost database does not know yet who lives and who waits.
if age_ms < settle_ms then
  return {'settling', settle_ms - age_ms}
end

-- A queue that others have filled still has room, as much again, for a tenant who waits with less than an equal part.
local mine = class .. '|' .. ticket.tenant
local own = redis.call('ZLEXCOUNT', QUEUE, '[' .. mine .. '|', '(' .. mine .. '}')
local tenants = redis.call('ZLEXCOUNT', TURNS, '[' .. class .. '|', '(' .. class .. '}') + (own == 0 and 1 or 0)
local sums = redis.call('HMGET', LOAD, 'tokens:' .. class, 'tokens:' .. mine)
if tenants > 1 and own < math.floor(max_waiting / tenants) then
  max_waiting = 2 * max_waiting
end
if tenants > 1 and number(sums[2]) + ticket.prompt_tokens <= max_tokens / tenants then
  max_tokens = 2 * max_tokens
end

local waiting = num_waiting(class)
local tokens = number(sums[1])
local excess = math.max(waiting + 1 - max_waiting, 0)
local why = excess > 0 and 'requests'
if not why and waiting > 0 and tokens + ticket.prompt_tokens > max_tokens then
  why = 'tokens'
  excess = math.ceil((tokens + ticket.prompt_tokens - max_tokens) * waiting / tokens)
end
if why then
  -- The time in which a tenth of the queue leaves, and at least as much as this ticket needs: earlier retries
  -- would meet each other at the same few places.
  local interval = tonumber(redis.call('HGET', LOAD, 'interval:' .. class) or DEFAULT_INTERVAL_MS)
  local leaving = math.max(excess, math.ceil(waiting / 10), 1)
  return {'full', why, waiting, math.floor(math.min(math.max(interval * leaving, 100), 30000))}
end

ticket.order = number_after(QUEUE, string.format('%s|%s|%02.0f', class, ticket.tenant, HIGHEST_PRIORITY - ticket.priority))
ticket.since = now
local wait_ms = predicted_wait(class, num_ahead(ticket, attempt))
if ticket.max_wait_ms and wait_ms > ticket.max_wait_ms then
  return {'late', wait_ms}
end
return take_in(ticket, attempt, lease_ms)
