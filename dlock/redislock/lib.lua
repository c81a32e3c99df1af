-- What the scripts share, prepended to each of them.
-- KEYS: lock, fence counter, queue; renew has the lock alone. ARGV: floor of the counters, 1 if the server knows all
-- subscribers (it does not in a Cluster), and then the script's own.
-- An entry of the queue is "HANDOFF-TTL CHANNEL OWNER"; its first two words are the place of all waiters of a process.
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
local floor, counted = ARGV[1], ARGV[2]
local ENTRY = '^(%d+) (%S+) (.*)$'

-- How long a queue is kept that nobody has polled, in ms. Waiters poll more often than that.
local KEPT = 120000

-- unreadable reports whether the user lacks permission (in the words of Redis 6, 7 and later) or the key has the wrong type, rather
-- than that the key is on another server.
local function unreadable(err)
  for _, says in ipairs({'NOPERM', 'ACL failure', "executing the script can't", 'WRONGTYPE'}) do
    if string.find(err, says, 1, true) then
      return true
    end
  end
end

-- mint increments the fence counter and returns the token, or nil and what is wrong with the counter. A counter that is
-- missing starts from the floor, the greatest that was ever reaped. In a Cluster nothing is, and a script can't read it.
local function mint()
  local token = redis.pcall('INCR', fence)
  if type(token) ~= 'number' then
    local why = string.match(token.err, '^@user_script: %d+: %-?(.*)$') or token.err -- the client's library must see a READONLY
    if string.find(why, "executing the script can't", 1, true) then -- as Redis 6 says
      why = 'NOPERM ' .. why
    end
    if string.find(why, 'not an integer', 1, true) or string.find(why, 'WRONGTYPE', 1, true) then
      why = 'ERR fence counter ' .. fence .. ' is not a number'
    end
    return nil, why
  end
  if token == 1 then
    local least = redis.pcall('GET', floor)
    local refused, bad = type(least) == 'table' and least.err, nil
    if refused and string.find(refused, 'WRONGTYPE', 1, true) or type(least) == 'string' and not string.find(least, '^%d+$') then
      bad = 'ERR ' .. floor .. ', where counters start, is not a number'
    elseif refused and unreadable(refused) then
      bad = 'NOPERM ' .. floor .. ', where counters start: ' .. refused
    end
    if bad then
      redis.call('DEL', fence) -- or the next call would start from 1
      return nil, bad
    end
    if type(least) == 'string' then
      redis.call('SET', fence, least)
      token = redis.call('INCR', fence)
    end
  end
  if token < 1 or token >= 2^53 then -- Lua's numbers are doubles: from 2^53 on, two tokens could look the same
    return nil, 'ERR fence counter ' .. fence .. ' is out of range: tokens go from 1 to 2^53 - 1'
  end
  return token
end

-- subscribers returns how many subscribe to a channel; 1 if the server doesn't know, or the user may not ask.
local function subscribers(channel)
  if counted ~= '1' then
    return 1
  end
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 1
end

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

-- hand_over grants the lock, which is free or its owner's to give away, to the first waiter that subscribes: it takes it off
-- the queue, mints its token, notifies it, and sets the lock to its handoff TTL. It returns the waiter and its token, or
-- nil, nil and, if that is why, what went wrong; the lock is then as it was. A waiter that doesn't subscribe is gone. It is
-- not notified, since it may subscribe to a server that was the master once.
-- asker, if given, is a waiter that learns of its grant by this script's reply; gone one that has released, and may be in
-- the queue again: a request that it repeated came late.
local function hand_over(asker, gone)
  while true do
    local entry = redis.call('LPOP', queue)
    if not entry then
      return nil
    end
    local ttl, channel, waiter = string.match(entry, ENTRY)
    if waiter ~= gone and (waiter == asker or subscribers(channel) > 0) then
      local token, wrong = mint()
      if token and waiter ~= asker then
        local told = redis.pcall('PUBLISH', channel, 'granted ' .. string.format('%.0f', token) .. ' ' .. waiter .. ' ' .. lock)
        wrong = type(told) == 'table' and told.err
      end
      if wrong then
        redis.call('LPUSH', queue, entry)
        return nil, nil, wrong
      end
      if token % 64 == 0 then
        redis.call('PEXPIRE', queue, KEPT)
      end
      redis.call('SET', lock, waiter, 'PX', ttl)
      return waiter, token
    end
  end
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
