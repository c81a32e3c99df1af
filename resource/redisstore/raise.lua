-- Raises the fence of a record to (token, 0), unless the same grant or a later one has touched it, and reads the record.
-- KEYS: record. ARGV: token. Returns the fence and the value; a token greater than the one asked for is a refusal.
local token = ARGV[1]
if compare(token, seen_token) > 0 then
  redis.call('HSET', KEYS[1], 'token', token, 'seq', '0')
end
return redis.call('HMGET', KEYS[1], 'token', 'seq', 'value')
