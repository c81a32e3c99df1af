-- One row per lock. It is created by the first acquisition of its key, or by the undoing of one, and stays: its counter
-- is where tokens come from.
CREATE TABLE IF NOT EXISTS fencelab_lock (
  key     text COLLATE "C" PRIMARY KEY, -- compared by its bytes
  owner   text,                         -- NULL: nobody's
  fence   bigint NOT NULL CHECK (fence >= 1), -- no greater token has been handed out
  expires timestamptz NOT NULL          -- the lease is good before this moment on the database's clock
) WITH (fillfactor = 50); -- room for new versions of a row in its own page, so that no update touches the index
