-- Frees the lock, if it is still the owner's, by handing it to the next waiter; else takes the owner out of the queue,
-- if it is there. KEYS: as of acquire. ARGV: owner, its entry in the queue up to its name.
-- Returns 1, or 0 if the lock was not the owner's.
local lock, fence, queue, floor = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('GET', lock) == ARGV[1] then
  if not hand_over(lock, fence, floor, queue) then
    redis.call('DEL', lock)
  end
  return 1
end
redis.call('LREM', queue, 0, ARGV[2] .. ARGV[1])
return 0
