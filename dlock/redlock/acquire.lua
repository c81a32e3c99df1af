-- Phase one on one node: takes the lock, unless another owner has it, and reads the fence counter.
-- KEYS: lock, fence counter. ARGV: owner, number of the attempt, TTL in ms.
-- Returns {1, counter, 1 if this owner wrote it, 1 if the lock already was this owner's, ""},
-- or {0, counter, 1 if this owner wrote it, ms until the holder's lease ends, holder}.
local last = redis.call('HMGET', KEYS[2], 'token', 'owner')
local token = tonumber(last[1] or 0)
if not token or token < 0 or token >= 2^53 or token % 1 ~= 0 then -- Lua's numbers are doubles
  return redis.error_reply('ERR fence counter ' .. KEYS[2] .. ' is out of range: tokens go from 1 to 2^53 - 1')
end
local own = last[2] == ARGV[1] and 1 or 0
local lock = redis.call('GET', KEYS[1])
if lock then
  -- The same owner's later attempt has taken the lock over: this one has been given up, and its request comes late.
  local holder, attempt = string.match(lock, '^(.*) (%d+)$')
  if holder ~= ARGV[1] or tonumber(attempt) > tonumber(ARGV[2]) then
    return {0, token, own, redis.call('PTTL', KEYS[1]), holder or lock}
  end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
return {1, token, own, lock and 1 or 0, ''}
