-- Takes the lock and mints its fencing token in one step.
-- KEYS: lock, fence counter. ARGV: owner, TTL in ms.
-- Returns {token}, or {0, ms until the holder's lease ends}.
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then
  -- The same acquisition again: a reply was lost. Nobody has acquired since, so the counter still is this grant's token.
  -- The lease starts anew, for its holder counts from this request.
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {tonumber(redis.call('GET', KEYS[2]))}
end
if owner then
  return {0, redis.call('PTTL', KEYS[1])}
end
-- The counter first: a script that fails is not rolled back, and a lock without a token must not exist.
local token = redis.call('INCR', KEYS[2])
if token < 1 or token >= 2^53 then -- Lua's numbers are doubles: from 2^53 on, two tokens could look the same
  return redis.error_reply('ERR fence counter ' .. KEYS[2] .. ' is out of range: tokens go from 1 to 2^53 - 1')
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {token}
