-- Phase two on one node: raises the fence counter to the token, if the lock still is this attempt's.
-- KEYS: lock, fence counter. ARGV: owner, number of the attempt, token.
-- Returns {1, token}, {0, counter} if the token is taken or too low here, or {-1, 0} if the lock is gone.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ' ' .. ARGV[2] then
  return {-1, 0}
end
local last = redis.call('HMGET', KEYS[2], 'token', 'owner')
local counter, token = tonumber(last[1] or 0), tonumber(ARGV[3])
if token > counter then
  redis.call('HSET', KEYS[2], 'token', ARGV[3], 'owner', ARGV[1])
elseif token < counter or last[2] ~= ARGV[1] then
  return {0, counter}
end
return {1, token}
