-- Frees the lock, if it is still the owner's. KEYS: lock. ARGV: owner. Returns 1, or 0 if it is not.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
