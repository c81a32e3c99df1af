-- Frees the lock on one node, if it is still the owner's and not taken by an attempt later than the one that is given up.
-- KEYS: lock. ARGV: owner, number of the attempt. Returns 1, or 0 if it is not.
local owner, attempt = string.match(redis.call('GET', KEYS[1]) or '', '^(.*) (%d+)$')
if owner == ARGV[1] and tonumber(attempt) <= tonumber(ARGV[2]) then
  return redis.call('DEL', KEYS[1])
end
return 0
