-- Frees the lock, if it is still the owner's, by handing it to the next waiter; else takes the owner out of the queue,
-- if it is there. KEYS: as of acquire. ARGV: owner, its entry in the queue up to its name, the name of the counters'
-- floor, 1 if the server knows all who listen; and the token of the grant that is meant, if it is no other.
-- Returns 1, or 0 if the lock was not the owner's.
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
if redis.call('GET', lock) == ARGV[1] then
  if ARGV[5] and redis.call('GET', fence) ~= ARGV[5] then
    return 0
  end
  if not hand_over(lock, fence, ARGV[3], queue, ARGV[4]) then
    redis.call('DEL', lock)
  end
  return 1
end
redis.call('LREM', queue, 0, ARGV[2] .. ARGV[1])
return 0
