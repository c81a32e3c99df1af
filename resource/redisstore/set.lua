-- Sets the fence of a record that exists to (token, 0). KEYS: record. ARGV: token. Returns 1, or 0 if there is no record.
if not seen[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'seq', '0')
return 1
