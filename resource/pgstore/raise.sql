-- Raises the fence of a key, unless an equal or greater one is accepted, and reads the key.
-- $1: key, $2: token, $3: seq, $4: whether to return the value.
-- One row: the fence and the value; whether that fence refuses the call, the caller says.
-- No row: a concurrent one was faster, the table is unlogged, or a temporary table or view shadows it.
WITH lasting AS MATERIALIZED ( -- no row for a temporary or unlogged table
  SELECT FROM pg_catalog.pg_class WHERE oid = 'fencelab_fence'::regclass AND relpersistence = 'p'
), held AS MATERIALIZED ( -- a first check, as in write.sql
  SELECT token, seq, CASE WHEN token = $2::numeric AND $4::boolean THEN value END AS value
  FROM fencelab_fence
  WHERE key = $1::text AND (token, seq) >= ($2::numeric, $3::numeric) AND EXISTS (SELECT FROM lasting)
), raised AS (
  INSERT INTO fencelab_fence AS f (key, token, seq)
  SELECT $1::text, $2::numeric, $3::numeric
  WHERE NOT EXISTS (SELECT FROM held) AND EXISTS (SELECT FROM lasting)
  ON CONFLICT (key) DO UPDATE SET token = excluded.token, seq = excluded.seq
  WHERE (f.token, f.seq) < (excluded.token, excluded.seq)
  RETURNING token, seq, CASE WHEN $4::boolean THEN value END AS value
)
SELECT token::text, seq::text, encode(value, 'hex') AS value FROM raised
UNION ALL
SELECT token::text, seq::text, encode(value, 'hex') AS value FROM held
-- Its own grant: as in write.sql.
WHERE CASE WHEN token = $2::numeric AND $3::numeric IN (seq, 0) AND current_setting('synchronous_standby_names') <> ''
  THEN pg_catalog.pg_logical_emit_message(true, 'fencelab', ''::text) IS NOT NULL ELSE true END
