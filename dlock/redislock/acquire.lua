-- Takes the lock and mints its fencing token in one step, or joins the queue.
-- KEYS: lock, fence counter, queue, and, unless in a Cluster, the counters' floor.
-- ARGV: owner, TTL in ms; and of one that waits: its entry in the queue up to its name, the most that may wait, and
-- anything if it may be in the queue already.
-- Returns {token}; or {0, ms until the holder's lease ends}; or, to one that waits, {0, ms, its place in the queue from 1,
-- the queue's length, the time in µs}, where ms is -1 for one that is not first and was not in the queue; or {-1} if too
-- many wait.
local lock, fence, queue, floor = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, ttl = ARGV[1], ARGV[2]

local holder = redis.call('GET', lock)
if holder == owner then
  -- The same acquisition again: a reply or a push was lost. Nobody has acquired since, so the counter still is this
  -- grant's token. The lease starts anew, for its holder counts from this request.
  redis.call('PEXPIRE', lock, ttl)
  return {tonumber(redis.call('GET', fence))}
end
if not holder then
  -- Whoever waits was here first.
  local first, token = hand_over(lock, fence, floor, queue, ARGV[3] and owner)
  if not first then
    if token then -- what is wrong with the counter
      return redis.error_reply(token)
    end
    local wrong
    token, wrong = mint(fence, floor) -- before the lock: a lock without a token must not exist
    if not token then
      return redis.error_reply(wrong)
    end
    first = owner
  end
  if first == owner then
    redis.call('SET', lock, owner, 'PX', ttl)
    return {token}
  end
end
if not ARGV[3] then
  return {0, redis.call('PTTL', lock)}
end
local entry = ARGV[3] .. owner
local place
if ARGV[5] then
  place = redis.call('LPOS', queue, entry)
end
local length
if place then
  place = place + 1
  length = redis.call('LLEN', queue)
else
  place = redis.call('RPUSH', queue, entry)
  length = place
  if place > tonumber(ARGV[4]) then
    redis.call('RPOP', queue)
    return {-1}
  end
end
local left = -1
if place == 1 or ARGV[5] then
  left = redis.call('PTTL', lock)
  redis.call('PEXPIRE', queue, kept) -- so do hand_over and hint
end
local now = redis.call('TIME')
return {0, left, place, length, now[1] * 1000000 + now[2]}
