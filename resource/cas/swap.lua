-- Sets a value if its version is the one expected. KEYS: record. ARGV: version, next version, value. Returns 1, or 0 on a
-- conflict. Versions are compared as text: Lua's numbers are exact up to 2^53 only.
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'value', ARGV[3])
return 1
