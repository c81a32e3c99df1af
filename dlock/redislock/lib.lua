-- What acquire, renew, release and leave share, prepended to each of them.
-- KEYS: lock, fence counter, queue; renew has the lock alone. ARGV: floor of the counters, 1 if the server knows all
-- subscribers (it does not in a Cluster), and then the script's own.
-- An entry of the queue is "HANDOFF-TTL CHANNEL OWNER"; its first two words are the place of all waiters of a process.
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
local floor, counted = ARGV[1], ARGV[2]
local ENTRY = '^(%d+) (%S+) (.*)$'

-- How long a queue is kept that nobody has polled, in ms. Waiters poll more often than that.
local KEPT = 120000

-- unreadable reports whether the user lacks permission, in the words of Redis 6, 7 and later, rather than that the key is on another
-- server.
local function unreadable(err)
  for _, says in ipairs({'NOPERM', 'ACL failure', "executing the script can't"}) do
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
    local start = type(least) == 'string' and (string.match(least, '^%d+$') and tonumber(least) or 2^53)
    if refused and string.find(refused, 'WRONGTYPE', 1, true) or start and (start > 2^53 - 2 or string.format('%.0f', start) ~= least) then
      bad = 'ERR ' .. floor .. ', where counters start, is not a number from 0 to 2^53 - 2'
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
