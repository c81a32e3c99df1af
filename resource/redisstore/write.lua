-- Sets a record's value if the fence is greater than the greatest accepted. KEYS: record. ARGV: token, seq, value.
-- Returns nothing, or the fence seen and 1 if it and the value are those of this very write, else 0.
local token, seq, value = ARGV[1], ARGV[2], ARGV[3]
if not after(token, seq, seen_token, seen_seq) then
  local applied = token == seen_token and seq == seen_seq and redis.call('HGET', KEYS[1], 'value') == value
  return {seen_token, seen_seq, applied and '1' or '0'}
end
-- One command: a script that fails is not rolled back.
redis.call('HSET', KEYS[1], 'token', token, 'seq', seq, 'value', value)
return {}
