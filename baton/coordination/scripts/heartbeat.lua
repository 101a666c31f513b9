-- ARGV: worker id, incarnation, record, wake channel. Returns 1; 0 when this incarnation was replaced; the address of
-- another worker that is alive under this id. At one address only one process listens, so there the old one is gone.
local id, incarnation, raw, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
epoch()
if redis.call('ZSCORE', RETIRED, id .. '|' .. incarnation) then
  return 0
end
local before = redis.call('HGET', WORKERS, id)
local old = before and cjson.decode(before)
local new = cjson.decode(raw)
if old and old.incarnation ~= incarnation and old.address ~= new.address and is_alive(id) then
  return old.address
end
if not old or old.incarnation ~= incarnation then
  free_other_incarnations(id, incarnation)
  if old then
    redis.call('ZADD', RETIRED, int(now), id .. '|' .. old.incarnation)
  end
  redis.call('ZREMRANGEBYSCORE', RETIRED, '-inf', int(now - RETIRED_MS))
end
local has_more = not is_alive(id) or old.incarnation ~= incarnation or old.state ~= new.state
  or old.num_blocks ~= new.num_blocks or old.max_num_seqs ~= new.max_num_seqs
redis.call('HSET', WORKERS, id, raw)
redis.call('ZADD', BEATS, int(now), id)
if has_more and redis.call('ZCARD', QUEUE) > 0 then
  redis.call('PUBLISH', channel, id)
end
return 1
