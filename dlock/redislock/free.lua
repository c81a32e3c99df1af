-- Deletes the lock, if it is still the owner's, and hands it to nobody: what is left of a release while a Cluster moves the
-- slot. KEYS: lock. ARGV: owner. Returns 1, or 0 if the lock was not the owner's.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
