-- Deletes fence counters whose lock is free, after it has raised the floor from which a counter that is not there starts
-- to the greatest of them: no token goes backwards. KEYS: floor, then counter, lock and queue of each key.
-- Returns how many were deleted.
local floor = tonumber(redis.call('GET', KEYS[1]) or 0)
if not floor then
  return redis.error_reply('ERR ' .. KEYS[1] .. ', where counters start, is not a number')
end
local gone = {}
for i = 2, #KEYS, 3 do
  if redis.call('EXISTS', KEYS[i + 1], KEYS[i + 2]) == 0 then
    local token = tonumber(redis.call('GET', KEYS[i]))
    if token and token >= 1 and token < 2^52 then -- a greater one as the floor would leave new keys without tokens
      floor = math.max(floor, token)
      gone[#gone + 1] = KEYS[i]
    end
  end
end
if #gone > 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', floor))
  return redis.call('UNLINK', unpack(gone))
end
return 0
