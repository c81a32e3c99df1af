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

-- hint tells the first waiter for how long the lock is held, so that it asks when that is over, and not before.
local function hint(lock, queue)
  local entry = redis.call('LINDEX', queue, 0)
  if entry then
    local channel, waiter = string.match(entry, '^%d+ (%S+) (.*)$')
    redis.call('PUBLISH', channel, 'held ' .. redis.call('PTTL', lock) .. ' ' .. waiter)
    redis.call('PEXPIRE', queue, kept)
  end
end

-- listeners is how many listen on a channel.
-- counted: the server knows all who do, which it doesn't in a Cluster; else it is taken for one.
local function listeners(channel, counted)
  if counted ~= '1' then
    return 1
  end
  return redis.call('PUBSUB', 'NUMSUB', channel)[2]
end

-- hand_over gives the lock, which is nobody's any more, to the first waiter that listens: it takes waiters off the queue,
-- mints the token, sets the lock to the waiter's short lease, and only then tells the waiter. It returns that waiter and
-- its token, or nil if there was none. The lock's key is then still what it was.
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
      if not token then
        redis.call('LPUSH', queue, entry)
        return nil, wrong
      end
      if token % 64 == 0 then
        redis.call('PEXPIRE', queue, kept)
      end
      redis.call('SET', lock, waiter, 'PX', lease)
      if waiter ~= asker then
        redis.call('PUBLISH', channel, 'granted ' .. string.format('%.0f', token) .. ' ' .. #waiter .. ' ' .. waiter .. lock)
      end
      return waiter, token
    end
  end
end
