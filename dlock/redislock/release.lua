-- Releases the lock, if it is still the owner's, by handing it to the next waiter. ARGV: owner.
-- Returns 1, or 0 if the lock was not the owner's.
if redis.call('GET', lock) ~= ARGV[3] then
  return 0
end
if not hand_over(nil, ARGV[3]) then
  redis.call('DEL', lock)
end
return 1
