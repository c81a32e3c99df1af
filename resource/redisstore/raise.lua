-- Raises the fence of a record, unless an equal or greater one is accepted, and reads the record. KEYS: record. ARGV: token, seq.
-- Returns the fence and the value; whether that fence refuses the call, the caller says.
local token, seq = ARGV[1], ARGV[2]
if after(token, seq, seen_token, seen_seq) then
  redis.call('HSET', KEYS[1], 'token', token, 'seq', seq)
end
return redis.call('HMGET', KEYS[1], 'token', 'seq', 'value')
