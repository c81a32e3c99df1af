-- Sets the value whatever the fence: for experiments. $1: key, $2: token, $3: seq, $4: value.
INSERT INTO fencelab_fence AS f (key, token, seq, value)
VALUES ($1::text, $2::numeric, $3::numeric, $4::bytea)
ON CONFLICT (key) DO UPDATE SET
  token = greatest(f.token, excluded.token),
  seq = CASE WHEN (f.token, f.seq) < (excluded.token, excluded.seq) THEN excluded.seq ELSE f.seq END,
  value = excluded.value
