-- Restarts the lease, if it is still the owner's, and tells the first waiter how long it lasts. ARGV: owner, TTL in ms, the
-- queue. Returns 1, or 0 if the lock was not the owner's. The lock is the only key, so that a lease can be renewed while a
-- Cluster moves its slot.
if redis.call('GET', lock) ~= ARGV[3] then
  return 0
end
redis.call('PEXPIRE', lock, ARGV[4])
tell_first(ARGV[5], ARGV[4])
return 1
