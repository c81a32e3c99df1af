-- Restarts the lease, if it is still the owner's, and tells the first waiter. KEYS: lock, and no other, so that a held lock
-- can be renewed while a Cluster moves its slot. ARGV: owner, TTL in ms, the queue's name.
-- Returns 1, or 0 if it is not.
local lock = KEYS[1]
if redis.call('GET', lock) == ARGV[1] then
  redis.call('PEXPIRE', lock, ARGV[2])
  hint(lock, ARGV[3])
  return 1
end
return 0
