-- One row per resource, created by its first fence. Keep it: without the fence, old holders get in.
CREATE TABLE IF NOT EXISTS fencelab_fence (
  key     text COLLATE "C" PRIMARY KEY, -- compared by its bytes
  -- The greatest fence accepted. Fences are unsigned: bigint ends at half their range.
  token   numeric(20) NOT NULL CHECK (token BETWEEN 0 AND 18446744073709551615),
  seq     numeric(20) NOT NULL CHECK (seq BETWEEN 0 AND 18446744073709551615),
  value   bytea, -- written by Store.Write
  request bytea  -- the last GuardOnce's; empty after Guard, NULL after Store.Write
) WITH (fillfactor = 50); -- room for new row versions in the page, so that updates leave the index alone
