-- Restarts the lease, if it is still the owner's, and tells the first waiter. KEYS: lock, queue. ARGV: owner, TTL in ms.
-- Returns 1, or 0 if it is not.
local lock, queue = KEYS[1], KEYS[2]
if redis.call('GET', lock) == ARGV[1] then
  redis.call('PEXPIRE', lock, ARGV[2])
  hint(lock, queue)
  return 1
end
return 0
