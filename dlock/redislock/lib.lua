-- What the scripts share; it stands before each of them.

-- mint counts the fence counter on and returns the token, or nil and what is wrong with the counter. A counter that is
-- not there starts from floor, the greatest that was ever reaped, if that key is given.
local function mint(fence, floor)
  local token = redis.pcall('INCR', fence)
  if type(token) ~= 'number' then
    return nil, 'ERR fence counter ' .. fence .. ' is not a number'
  end
  if token == 1 and floor then
    local least = redis.call('GET', floor)
    if least then
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

-- hand_over gives the lock, which is nobody's any more, to the first waiter that hears of it: it takes waiters off the
-- queue, mints the token, sets the lock to the waiter's short lease, and only then tells the waiter. It returns that
-- waiter and its token, or nil if there was none. The lock's key is then still what it was.
-- PUBLISH tells how many have heard it, except in a Cluster, where there is no floor. What nobody hears is news for a
-- waiter whose connection is gone.
-- asker, if given, is a waiter that learns of its grant by this script's reply.
local function hand_over(lock, fence, floor, queue, asker)
  local token
  while true do
    local entry = redis.call('LPOP', queue)
    if not entry then
      return nil
    end
    if not token then
      local wrong
      token, wrong = mint(fence, floor)
      if not token then
        redis.call('LPUSH', queue, entry)
        return nil, wrong
      end
      if token % 64 == 0 then
        redis.call('PEXPIRE', queue, kept)
      end
    end
    local lease, channel, waiter = string.match(entry, '^(%d+) (%S+) (.*)$')
    redis.call('SET', lock, waiter, 'PX', lease)
    if waiter == asker then
      return waiter, token
    end
    local heard = redis.call('PUBLISH', channel,
      'granted ' .. string.format('%.0f', token) .. ' ' .. #waiter .. ' ' .. waiter .. lock)
    if heard > 0 or not floor then
      return waiter, token
    end
    redis.call('DEL', lock)
  end
end
