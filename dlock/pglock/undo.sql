-- Frees the lock like a release, for a request whose outcome isn't known. $1: key, $2: owner.
-- If the request was the first for its key and is being committed, there is a row that an UPDATE neither sees nor waits for. An
-- INSERT does. If there is none to come, it leaves one whose lease is over.
WITH undone AS (
  INSERT INTO fencelab_lock AS l (key, owner, fence, expires)
  VALUES ($1::text, $2::text, 1, clock_timestamp())
  ON CONFLICT (key) DO UPDATE SET owner = NULL
  WHERE l.owner = $2::text AND l.expires > clock_timestamp()
  RETURNING key, owner
)
SELECT pg_notify('fencelab_released', key) FROM undone WHERE owner IS NULL
