-- Sets the value of a record whatever the fence: for experiments. KEYS: record. ARGV: token, seq, value.
local token, seq, value = ARGV[1], ARGV[2], ARGV[3]
if not after(token, seq, seen_token, seen_seq) then
  token, seq = seen_token, seen_seq
end
redis.call('HSET', KEYS[1], 'token', token, 'seq', seq, 'value', value)
return {}
