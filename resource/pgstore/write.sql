-- Raises the fence of a key to a greater one, and sets the value or the request.
-- $1: key, $2: token, $3: seq, $4: value, NULL to leave it alone, $5: request, empty for none, NULL with a value.
-- One row: NULLs if accepted, else the fence seen and whether it is this very write.
-- No row: a concurrent one was faster, the table is unlogged, or a temporary table or view shadows it.
WITH lasting AS MATERIALIZED ( -- no row for a temporary or unlogged table
  SELECT FROM pg_catalog.pg_class WHERE oid = 'fencelab_fence'::regclass AND relpersistence = 'p'
), held AS MATERIALIZED (
  -- A first check on the statement's snapshot, so that a refusal writes nothing and reports what it has seen. The one that
  -- counts is the WHERE of the update, which PostgreSQL evaluates on the newest version of the row, once it has locked it.
  SELECT token, seq, coalesce(
    (token, seq) = ($2::numeric, $3::numeric) AND (value = $4::bytea AND request IS NULL OR request = $5::bytea AND $5::bytea <> ''),
    false) AS applied
  FROM fencelab_fence
  WHERE key = $1::text AND (token, seq) >= ($2::numeric, $3::numeric) AND EXISTS (SELECT FROM lasting)
), accepted AS (
  INSERT INTO fencelab_fence AS f (key, token, seq, value, request)
  SELECT $1::text, $2::numeric, $3::numeric, $4::bytea, $5::bytea
  WHERE NOT EXISTS (SELECT FROM held) AND EXISTS (SELECT FROM lasting)
  ON CONFLICT (key) DO UPDATE SET
    token = excluded.token,
    seq = excluded.seq,
    value = coalesce(excluded.value, f.value),
    request = excluded.request
  WHERE (f.token, f.seq) < (excluded.token, excluded.seq)
  RETURNING key
)
SELECT NULL::text AS token, NULL::text AS seq, false AS applied FROM accepted
UNION ALL
SELECT token::text, seq::text, applied FROM held
-- The first commit's wait for a standby may have been cut short: write to the log, so that this commit waits, too.
WHERE CASE WHEN applied AND current_setting('synchronous_standby_names') <> ''
  THEN pg_catalog.pg_logical_emit_message(true, 'fencelab', ''::text) IS NOT NULL ELSE true END
