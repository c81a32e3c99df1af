-- Takes owners off the queue, and hands the lock over if it is one of theirs, or free: one of them may have freed it while
-- a Cluster moved the slot. ARGV: the owners' entries. Returns the owner whose lock it was, or "".
local gone, owners = {}, {}
for i = 3, #ARGV do
  gone[ARGV[i]] = true
  owners[select(3, string.match(ARGV[i], ENTRY))] = true
end
if #ARGV > 10 then
  remove(function(entry) return gone[entry] end)
else
  for entry in pairs(gone) do
    redis.call('LREM', queue, 0, entry)
  end
end
local holder = redis.call('GET', lock)
if holder and not owners[holder] then
  tell_first(queue, redis.call('PTTL', lock)) -- if those before it have left, it doesn't know
  return ''
end
if not hand_over() and holder then
  redis.call('DEL', lock)
end
return holder or ''
