-- $1: key, $2: token.
UPDATE fencelab_fence SET token = $2::numeric, seq = 0 WHERE key = $1::text
