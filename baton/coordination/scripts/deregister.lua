-- ARGV: worker id, incarnation.
local id, incarnation = ARGV[1], ARGV[2]
redis.call('ZADD', RETIRED, int(now), id .. '|' .. incarnation)
local raw = redis.call('HGET', WORKERS, id)
if raw and cjson.decode(raw).incarnation == incarnation then
  redis.call('HDEL', WORKERS, id)
  redis.call('ZREM', BEATS, id)
end
return 1
