-- Takes the lock and mints its fencing token in one step, or joins the queue.
-- KEYS: lock, fence counter, queue.
-- ARGV: owner, TTL in ms, the name of the counters' floor, 1 if the server knows all who listen; and of one that waits: its
-- entry in the queue up to its name, the most that may wait, and anything if it may be in the queue already.
-- Returns {token}, or {token, 1} if the lock was the owner's already; or {0, ms until the holder's lease ends}; or, to one
-- that waits, {0, ms, its place in the queue from 1}, where ms is -1 unless it is first; to one that may have been in the
-- queue also {..., the queue's length, the last token, how many listen for it}; or {-1} if too many wait.
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl, floor, counted = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local holder = redis.call('GET', lock)
if holder == owner then
  -- The same acquisition again: a reply or a push was lost. Nobody has acquired since, so the counter still is this
  -- grant's token. The lease starts anew, for its holder counts from this request.
  redis.call('PEXPIRE', lock, ttl)
  return {tonumber(redis.call('GET', fence)), 1}
end
local pause -- until the roll call is over
if not holder then
  local entry = redis.call('LINDEX', queue, 0) -- whoever waits was here first
  pause = entry and roll_call(lock, queue, entry, owner, ARGV[5])
  if not entry or pause == 0 then
    local first, token, wrong
    if entry then
      first, token = hand_over(lock, fence, floor, queue, counted, owner)
      wrong = not first and token
    end
    if not first and not wrong then
      token, wrong = mint(fence, floor) -- before the lock: a lock without a token must not exist
      first = owner
    end
    if wrong then
      return redis.error_reply(wrong)
    end
    if first == owner then
      redis.call('SET', lock, owner, 'PX', ttl)
      return {token}
    end
    pause = nil
  end
end
if not ARGV[5] then
  return {0, pause or redis.call('PTTL', lock)}
end
local entry = ARGV[5] .. owner
if not ARGV[7] then
  local place = redis.call('RPUSH', queue, entry)
  if place > tonumber(ARGV[6]) then
    redis.call('RPOP', queue)
    return {-1}
  end
  if place > 1 then
    return {0, pause or -1, place}
  end
  redis.call('PEXPIRE', queue, kept) -- so do hand_over and hint
  return {0, redis.call('PTTL', lock), place}
end
local channel = answers(queue, ARGV[5])
local length = redis.call('LLEN', queue)
local place = redis.call('LPOS', queue, entry)
if place then
  place = place + 1
elseif length >= tonumber(ARGV[6]) then
  return {-1}
else
  place = redis.call('RPUSH', queue, entry)
  length = place
end
redis.call('PEXPIRE', queue, kept)
local last = tonumber(redis.call('GET', fence)) or 0
return {0, pause or redis.call('PTTL', lock), place, length, last, listeners(channel, counted)}
