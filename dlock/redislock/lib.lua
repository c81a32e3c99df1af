-- What the scripts share; it stands before each of them.

-- mint counts the fence counter on and returns the token, or nil and what is wrong with the counter. A counter that is
-- not there starts from the floor, the greatest that was ever reaped. In a Cluster nothing is, and a script can't look.
local function mint(fence, floor)
  local token = redis.pcall('INCR', fence)
  if type(token) ~= 'number' then
    return nil, 'ERR fence counter ' .. fence .. ' is not a number'
  end
  if token == 1 then
    local least = redis.pcall('GET', floor)
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

-- A queue that nobody has come to for this long is forgotten, in ms. Go code asks more often than that.
local kept = 120000

-- hint tells the first waiter for how long the lock is held, so that it asks when that is over, and not before. It may
-- fail: while a Cluster moves the slot, the queue may be on another server than the lock.
local function hint(lock, queue)
  local entry = redis.pcall('LINDEX', queue, 0)
  if type(entry) == 'string' then
    local channel, waiter = string.match(entry, '^%d+ (%S+) (.*)$')
    redis.pcall('PUBLISH', channel, 'held ' .. redis.call('PTTL', lock) .. ' ' .. waiter)
    redis.call('PEXPIRE', queue, kept)
  end
end

-- listeners is how many listen on a channel; 1 if the server doesn't know, as in a Cluster (counted), or the user may not
-- ask it.
local function listeners(channel, counted)
  if counted ~= '1' then
    return 1
  end
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 1
end

-- strike takes the entries for which gone is true off the queue, however many they are.
local function strike(queue, gone)
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
  redis.call('PEXPIRE', queue, kept)
end

-- hand_over gives the lock, which is nobody's any more, to the first waiter that listens: it takes waiters off the queue,
-- mints the token, tells the waiter, and sets the lock to the waiter's first lease. It returns that waiter and its token,
-- or nil if there was none, and what was wrong, if anything was. The lock's key is then still what it was.
-- A waiter that doesn't listen is gone, and is not told, for it could be listening to a server that was the master once.
-- asker, if given, is a waiter that learns of its grant by this script's reply.
local function hand_over(lock, fence, floor, queue, counted, asker)
  while true do
    local entry = redis.call('LPOP', queue)
    if not entry then
      return nil
    end
    local lease, channel, waiter = string.match(entry, '^(%d+) (%S+) (.*)$')
    if waiter == asker or listeners(channel, counted) > 0 then
      local token, wrong = mint(fence, floor)
      if token and waiter ~= asker then
        local told = redis.pcall('PUBLISH', channel, 'granted ' .. string.format('%.0f', token) .. ' ' .. #waiter .. ' ' .. waiter .. lock)
        wrong = type(told) == 'table' and told.err
      end
      if wrong then
        redis.call('LPUSH', queue, entry)
        return nil, wrong
      end
      if token % 64 == 0 then
        redis.call('PEXPIRE', queue, kept)
      end
      redis.call('SET', lock, waiter, 'PX', lease)
      return waiter, token
    end
  end
end

local grace = 300 -- ms that a process has to answer a roll call
local asked = 60000 -- ms for which it is known that it was called

-- answers says that the process of one that asks lives. It returns its channel.
local function answers(queue, place)
  local channel = string.match(place, '^%d+ (%S+) ')
  redis.pcall('SREM', queue .. ':silent', channel)
  return channel
end

-- roll_call is called when a lease has run out and entry is the first in the queue. A lock that is handed to a dead waiter
-- is lost for its first lease, so all processes in the queue are called, and those that don't answer are struck. It returns
-- for how many ms the asker is to wait for that; 0 if the lock can be handed to the first.
local function roll_call(lock, queue, entry, owner, place)
  local silent = queue .. ':silent' -- the channels that have not answered
  local mine = place and answers(queue, place)
  local left = redis.pcall('PTTL', silent)
  if type(left) ~= 'number' then -- a Cluster moves the slot, and this one is elsewhere
    return grace
  end
  if left >= 0 and asked - left >= grace then
    local dead = {}
    for _, channel in ipairs(redis.call('SMEMBERS', silent)) do
      dead[channel] = true
      redis.call('PUBLISH', channel, 'struck ' .. lock) -- should it wake up
    end
    redis.call('DEL', silent)
    strike(queue, function(e) return dead[string.match(e, '^%d+ (%S+) ')] end)
    return 0
  end
  local first, waiter = string.match(entry, '^%d+ (%S+) (.*)$')
  if waiter == owner or first == mine or (left >= 0 and redis.call('SISMEMBER', silent, first) == 0) then
    return 0
  end
  if left >= 0 then
    return grace - (asked - left)
  end
  local seen = {}
  for _, e in ipairs(redis.call('LRANGE', queue, 0, -1)) do
    local channel = string.match(e, '^%d+ (%S+) ')
    if channel ~= mine and not seen[channel] then
      seen[channel] = true
      redis.call('SADD', silent, channel)
      redis.call('PUBLISH', channel, 'lapsed ' .. lock)
    end
  end
  redis.call('PEXPIRE', silent, asked)
  return grace
end
