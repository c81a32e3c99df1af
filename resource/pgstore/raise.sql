-- Raises the fence of a key to (token, 0), unless the same grant or a later one has touched the key, and reads it.
-- $1: key, $2: token, $3: whether to return the value.
-- One row: the fence and the value; a token greater than $2 is a refusal. No row: a concurrent one was faster.
WITH held AS MATERIALIZED ( -- a first check, as in write.sql
  SELECT token, seq, CASE WHEN token = $2::numeric AND $3::boolean THEN value END AS value
  FROM fencelab_fence
  WHERE key = $1::text AND token >= $2::numeric
), raised AS (
  INSERT INTO fencelab_fence AS f (key, token, seq)
  SELECT $1::text, $2::numeric, 0
  WHERE NOT EXISTS (SELECT FROM held)
  ON CONFLICT (key) DO UPDATE SET token = excluded.token, seq = 0
  WHERE f.token < excluded.token
  RETURNING token, seq, CASE WHEN $3::boolean THEN value END AS value
)
SELECT token::text, seq::text, value FROM raised
UNION ALL
SELECT token::text, seq::text, value FROM held
