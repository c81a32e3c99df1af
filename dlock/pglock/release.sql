-- Frees the lock, if it is still the owner's, and wakes those who wait once that is committed. $1: key, $2: owner.
-- The row stays, and with it the counter.
UPDATE fencelab_lock
SET owner = NULL
WHERE key = $1::text AND owner = $2::text AND expires > clock_timestamp()
RETURNING pg_notify('fencelab_released', key)
