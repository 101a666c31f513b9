-- ARGV: names of classes. Returns for each {waiting, their prompt tokens, prefills, ms the oldest has waited}.
local rows = {}
for i, class in ipairs(ARGV) do
  local load = redis.call('HMGET', LOAD, 'tokens:' .. class, 'prefills:' .. class)
  local oldest, from = now, '[' .. class .. '|'
  -- The first of each tenant and priority is the oldest of them.
  for _ = 1, MOST_TENANTS do
    local member = redis.call('ZRANGEBYLEX', QUEUE, from, '(' .. class .. '}', 'LIMIT', 0, 1)[1]
    if not member then
      break
    end
    local group, order = string.match(member, '^([^|]*|[^|]*|%d+)|(%d+)|')
    oldest = math.min(oldest, tonumber(order))
    from = '(' .. group .. '}'
  end
  rows[i] = {num_waiting(class), number(load[1]), number(load[2]), now - oldest}
end
return rows
