-- $1: key.
SELECT token::text, seq::text, value FROM fencelab_fence WHERE key = $1::text
