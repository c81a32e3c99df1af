-- The beginning of each script that writes. Fences are decimal numbers up to 2^64 - 1, and Lua's numbers are doubles, exact
-- up to 2^53, so fences are compared in two halves of ten digits.

-- compare returns a number less than, equal to or greater than 0 as a is less than, equal to or greater than b.
local function compare(a, b)
  a = string.rep('0', 20 - #a) .. a
  b = string.rep('0', 20 - #b) .. b
  local high = tonumber(string.sub(a, 1, 10)) - tonumber(string.sub(b, 1, 10))
  if high ~= 0 then
    return high
  end
  return tonumber(string.sub(a, 11)) - tonumber(string.sub(b, 11))
end

-- after tells whether one fence is greater than the other.
local function after(token, seq, other_token, other_seq)
  local d = compare(token, other_token)
  return d > 0 or d == 0 and compare(seq, other_seq) > 0
end

-- The greatest fence accepted, 0.0 of a record that doesn't exist.
local seen = redis.call('HMGET', KEYS[1], 'token', 'seq')
if not (seen[1] and seen[2]) and redis.call('EXISTS', KEYS[1]) == 1 then
  return redis.error_reply('the record is damaged: it has no fence')
end
local seen_token, seen_seq = seen[1] or '0', seen[2] or '0'
