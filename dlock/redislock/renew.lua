-- Restarts the lease, if it is still the owner's, and tells the first waiter how long it lasts, so that that one polls when
-- it is over, and not before. ARGV: owner, TTL in ms, the queue. Returns 1, or 0 if the lock was not the owner's.
-- The lock is the only key, so that a lease can be renewed while a Cluster moves its slot; the queue may then be on
-- another server, and to notify may fail.
if redis.call('GET', lock) ~= ARGV[3] then
  return 0
end
redis.call('PEXPIRE', lock, ARGV[4])
local entry = redis.pcall('LINDEX', ARGV[5], 0)
if type(entry) == 'string' then
  local _, channel, waiter = string.match(entry, ENTRY)
  redis.pcall('PUBLISH', channel, 'held ' .. ARGV[4] .. ' ' .. waiter)
  redis.call('PEXPIRE', ARGV[5], KEPT)
end
return 1
