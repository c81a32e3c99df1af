-- Restarts the lease, if it is still the owner's. $1: key, $2: owner, $3: TTL.
UPDATE fencelab_lock
SET expires = clock_timestamp() + $3::interval
WHERE key = $1::text AND owner = $2::text AND expires > clock_timestamp()
