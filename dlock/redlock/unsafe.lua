-- Takes the lock on one node, unless another owner has it, and counts up this node's own counter: Options.UnsafeCounters.
-- KEYS: lock, fence counter. ARGV: owner, number of the attempt, TTL in ms.
-- Returns what acquire.lua does; without the lock, 0 for the counter.
local lock = redis.call('GET', KEYS[1])
if lock then
  local holder, attempt = string.match(lock, '^(.*) (%d+)$')
  if holder ~= ARGV[1] or tonumber(attempt) > tonumber(ARGV[2]) then
    return {0, 0, 0, redis.call('PTTL', KEYS[1]), holder or lock}
  end
end
local token = redis.call('HINCRBY', KEYS[2], 'token', lock and 0 or 1)
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
return {1, token, 1, lock and 1 or 0, ''}
