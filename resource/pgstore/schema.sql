-- One row a resource. It is made by the first fence of its key and stays: the fence is what keeps old holders out.
CREATE TABLE IF NOT EXISTS fencelab_fence (
  key     text COLLATE "C" PRIMARY KEY, -- compared by its bytes
  -- The greatest fence accepted. Fences are unsigned: bigint ends at half their range.
  token   numeric(20) NOT NULL CHECK (token BETWEEN 0 AND 18446744073709551615),
  seq     numeric(20) NOT NULL CHECK (seq BETWEEN 0 AND 18446744073709551615),
  value   bytea, -- what Store.Write has written
  request bytea  -- what GuardOnce was told of the last write; empty after Guard, NULL after Store.Write
) WITH (fillfactor = 50); -- room for new versions of a row in its own page, so that no update touches the index
