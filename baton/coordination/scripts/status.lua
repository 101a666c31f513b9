-- ARGV: names of classes. Returns for each {waiting, their prompt tokens, prefills, ms the oldest has waited}.
local rows = {}
for i, class in ipairs(ARGV) do
  local load = redis.call('HMGET', LOAD, 'tokens:' .. class, 'prefills:' .. class)
  local member = redis.call('ZRANGEBYLEX', QUEUE, '[' .. class .. '|', '(' .. class .. '}', 'LIMIT', 0, 1)[1]
  local oldest_ms = 0
  if member then
    local attempt = string.match(member, '^[^|]*|%d+|(.*)$')
    oldest_ms = math.max(0, now - cjson.decode(redis.call('HGET', TICKETS, attempt)).since)
  end
  rows[i] = {num_waiting(class), number(load[1]), number(load[2]), oldest_ms}
end
return rows
