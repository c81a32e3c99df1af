-- Takes owners out of the queue, and hands the lock on, if it is one of theirs, or nobody's: one of them may have freed it
-- while a Cluster moved the slot. KEYS: lock, fence counter, queue.
-- ARGV: the name of the counters' floor, 1 if the server knows all who listen, and the owners' entries in the queue.
-- Returns the owner whose lock it was, or "".
local lock, fence, queue = KEYS[1], KEYS[2], KEYS[3]
local gone, owners = {}, {}
for i = 3, #ARGV do
  gone[ARGV[i]] = true
  owners[string.match(ARGV[i], '^%d+ %S+ (.*)$')] = true
end
if #ARGV > 10 then
  strike(queue, function(entry) return gone[entry] end)
else
  for entry in pairs(gone) do
    redis.call('LREM', queue, 0, entry)
  end
end
local holder = redis.call('GET', lock)
if holder and not owners[holder] then
  return ''
end
if not hand_over(lock, fence, ARGV[1], queue, ARGV[2]) and holder then
  redis.call('DEL', lock)
end
return holder or ''
