-- Restarts the lease on one node, if it is still the owner's. KEYS: lock. ARGV: owner, TTL in ms.
-- Returns 1, or 0 if it is not.
if string.match(redis.call('GET', KEYS[1]) or '', '^(.*) %d+$') == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
