-- What acquire, renew and leave also share, after lib.lua. Release does without it: each run of a script makes all of its
-- functions anew.

-- remove takes the entries for which gone returns true off the queue, in one pass.
local function remove(gone)
  local stay = {}
  for _, entry in ipairs(redis.call('LRANGE', queue, 0, -1)) do
    if not gone(entry) then
      stay[#stay + 1] = entry
    end
  end
  redis.call('DEL', queue)
  for i = 1, #stay, 1000 do
    redis.call('RPUSH', queue, unpack(stay, i, math.min(i + 999, #stay)))
  end
  redis.call('PEXPIRE', queue, KEPT)
end

-- tell_first tells the first waiter in a queue for how many ms the lease lasts, so that it polls when that is over, and not before. The
-- queue may be on another server, while a Cluster moves the slot.
local function tell_first(q, left)
  local entry = redis.pcall('LINDEX', q, 0)
  if type(entry) == 'string' then
    local _, channel, waiter = string.match(entry, ENTRY)
    redis.pcall('PUBLISH', channel, 'held ' .. left .. ' ' .. waiter)
    redis.call('PEXPIRE', q, KEPT)
  end
end

local GRACE = 300 -- ms that a process has to answer a roll call
local CALLED = 60000 -- ms for which a roll call is remembered

-- answer notes that the process of an asker lives, and returns its channel.
local function answer(place)
  local channel = string.match(place, '^%d+ (%S+) ')
  redis.pcall('SREM', queue .. ':silent', channel)
  return channel
end

-- roll_call is for a lease that has run out while others wait. A lock that is handed to a dead waiter is lost for a handoff
-- TTL, so all processes in the queue are called first, and the entries of those that don't answer are removed. It returns
-- how many ms the asker is to wait; 0 if the lock can be handed over.
local function roll_call(entry, asker, place)
  local silent = queue .. ':silent' -- the channels that have not answered
  local mine = place and answer(place)
  local left = redis.pcall('PTTL', silent)
  if type(left) ~= 'number' then
    -- A Cluster moves the slot, and what hand_over writes may be elsewhere too. Or scripts may not use this key: no roll call.
    return string.find(left.err, 'non local key', 1, true) and GRACE or 0
  end
  if left >= 0 and CALLED - left >= GRACE then
    local dead = {}
    for _, channel in ipairs(redis.call('SMEMBERS', silent)) do
      dead[channel] = true
    end
    redis.call('DEL', silent)
    remove(function(e) return dead[string.match(e, '^%d+ (%S+) ')] end)
    return 0
  end
  local _, first, waiter = string.match(entry, ENTRY)
  if waiter == asker or first == mine or (left >= 0 and redis.call('SISMEMBER', silent, first) == 0) then
    return 0
  end
  if left >= 0 then
    return GRACE - (CALLED - left)
  end
  for _, e in ipairs(redis.call('LRANGE', queue, 0, -1)) do
    local channel = string.match(e, '^%d+ (%S+) ')
    if channel ~= mine and redis.call('SADD', silent, channel) == 1 then
      redis.call('PUBLISH', channel, 'lapsed ' .. lock)
    end
  end
  redis.call('PEXPIRE', silent, CALLED)
  return GRACE
end
