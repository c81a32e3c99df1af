-- Frees the lock, if it is still the owner's, by handing it to the next waiter. KEYS: lock, fence counter, queue.
-- ARGV: owner, the name of the counters' floor, 1 if the server knows all who listen.
-- Returns 1, or 0 if the lock was not the owner's.
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
if redis.call('GET', lock) ~= ARGV[1] then
  return 0
end
if not hand_over(lock, fence, ARGV[2], queue, ARGV[3]) then
  redis.call('DEL', lock)
end
return 1
