-- $1: key. The value's text would depend on the session's bytea_output.
SELECT token::text, seq::text, encode(value, 'hex') AS value FROM fencelab_fence WHERE key = $1::text
