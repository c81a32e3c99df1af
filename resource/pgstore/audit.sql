-- Optional, after schema.sql: adds a row for every accepted fence, in its transaction. The ids of one key's rows rise in the
-- order in which the fences took effect, because the key's row is locked meanwhile. A refusal is rolled back and leaves none.
CREATE TABLE IF NOT EXISTS fencelab_audit (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at        timestamptz NOT NULL DEFAULT clock_timestamp(),
  key       text COLLATE "C" NOT NULL,
  token     numeric(20) NOT NULL,
  seq       numeric(20) NOT NULL,
  old_token numeric(20), -- NULL: the first
  old_seq   numeric(20),
  who       text NOT NULL DEFAULT current_setting('application_name')
);

CREATE OR REPLACE FUNCTION fencelab_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO fencelab_audit (key, token, seq) VALUES (NEW.key, NEW.token, NEW.seq);
  ELSE
    INSERT INTO fencelab_audit (key, token, seq, old_token, old_seq)
    VALUES (NEW.key, NEW.token, NEW.seq, OLD.token, OLD.seq);
  END IF;
  RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER fencelab_audit AFTER INSERT OR UPDATE ON fencelab_fence
FOR EACH ROW EXECUTE FUNCTION fencelab_audit();
