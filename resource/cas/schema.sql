CREATE TABLE IF NOT EXISTS fencelab_cas (
  key     text COLLATE "C" PRIMARY KEY, -- compared by its bytes
  version bigint NOT NULL CHECK (version > 0),
  value   bytea NOT NULL
) WITH (fillfactor = 50); -- room for new row versions in the page, so that updates leave the index alone
