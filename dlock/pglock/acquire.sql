-- Takes the lock and mints its fencing token in one statement. $1: key, $2: owner, $3: TTL.
-- One row: the token and no time, or no token and the microseconds until the holder's lease ends; no row: another was
-- faster. Not an interval, whose text depends on the session's IntervalStyle.
WITH held AS MATERIALIZED (
  -- Only a first look, at the statement's snapshot, so that a try in vain writes nothing. What counts is the WHERE of
  -- the update, which PostgreSQL evaluates on the newest version of the row, once it has locked it.
  SELECT (extract(epoch FROM expires - clock_timestamp()) * 1000000)::bigint AS time_left
  FROM fencelab_lock
  WHERE key = $1::text AND owner <> $2::text AND expires > clock_timestamp()
), taken AS (
  INSERT INTO fencelab_lock AS l (key, owner, fence, expires)
  SELECT $1::text, $2::text, 1, clock_timestamp() + $3::interval
  WHERE NOT EXISTS (SELECT FROM held)
  ON CONFLICT (key) DO UPDATE SET
    owner = excluded.owner,
    -- The same owner again: a reply was lost. It is the same acquisition, whose lease restarts.
    fence = l.fence + CASE WHEN l.owner = excluded.owner THEN 0 ELSE 1 END,
    -- Not excluded.expires, nor now(): they are from before the wait for the row's lock.
    expires = clock_timestamp() + $3::interval
  WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.expires <= clock_timestamp()
  RETURNING fence
)
SELECT fence, NULL::bigint AS time_left FROM taken
UNION ALL
SELECT NULL, time_left FROM held
