-- Takes the lock and mints its fencing token atomically, or joins the queue.
-- ARGV: owner, TTL in ms; and from a waiter: its place, the most that may wait, and anything if it may be in the queue already.
-- Returns {token}, or {token, 1} if the lock was the owner's already; {0, ms until the lease ends, position from 1, length of
-- the queue, the last token, subscribers of the asker} if it is held; {-1} if too many wait. A waiter that joins behind
-- others gets -1 for the ms: it needn't know, and the last token is 0 to all that join. A request that doesn't wait
-- gets 0 for all but the ms.
-- mint and hand_over are in lib.lua, roll_call and answer in queue.lua.
local owner, ttl, place, most, again = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local holder = redis.call('GET', lock)
if holder == owner then
  -- The same acquisition again: a reply or a notification was lost. Nobody has acquired since, so the counter still is
  -- this grant's token. The lease restarts, since its holder counts from this request.
  redis.call('PEXPIRE', lock, ttl)
  return {tonumber(redis.call('GET', fence)), 1}
end
local pause -- until the roll call is over
if not holder then
  local entry = redis.call('LINDEX', queue, 0) -- whoever waits was here first
  pause = entry and roll_call(entry, owner, place)
  if not entry or pause == 0 then
    local first, token, wrong
    if entry then
      first, token, wrong = hand_over(owner)
    end
    if not first and not wrong then
      token, wrong = mint() -- before the lock: a lock without a token must not exist
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
if not place then
  return {0, pause or redis.call('PTTL', lock), 0, 0, 0, 0}
end
local position, last, heard, left = nil, 0, 1, -1
local channel = answer(place) -- also one that joins: it may have had no waiter when it was called
if again then
  heard = subscribers(channel)
  position = redis.call('LPOS', queue, place .. owner)
  last = tonumber(redis.call('GET', fence)) or 0
end
local length = redis.call('LLEN', queue)
if position then
  position = position + 1
else
  if length >= tonumber(most) then -- before it is changed: a refusal costs no sync
    return {-1}
  end
  length = redis.call('RPUSH', queue, place .. owner)
  position = length
end
if again or position == 1 then
  redis.call('PEXPIRE', queue, KEPT) -- so do hand_over and renew
  left = redis.call('PTTL', lock)
end
return {0, pause or left, position, length, last, heard}
