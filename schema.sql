-- Fencepost outbox contract for SQLite, version 1.0
--
-- This file is the reference for workers in every language. It creates the tables, views and triggers
-- whose names begin with "outbox" and nothing else; it needs SQLite 3.37 or later, because of STRICT.
-- Afterwards no SQLite older than 3.37 can read the file at all, not even the business tables.
--
-- Apply it with `fencepost init --db app.db`, with the library's `sqlite::migrate`, inside a migration,
-- or by hand, on a database file in WAL mode, as
--     (echo 'BEGIN;'; cat schema.sql; echo 'COMMIT;') | sqlite3 -bail app.db
-- The outbox must be in the same database file as the business tables: SQLite does not commit
-- atomically across attached files in WAL mode.
--
-- Put no trigger and no unique index of your own on these tables: a trigger that writes commands from inside
-- one of these switches it off. The dispatcher refuses a database that has one.
--
-- The triggers guard against accidents. SQLite has no users: whoever may write the file can change
-- anything.
--
-- ── Words ──────────────────────────────────────────────────────────────────────────────────────────
-- scope      what is leased and fenced as one: an order, an account, a job
-- lane       a line of commands inside a scope; order is kept per lane; '' unless given
-- token      fencing token, 1 to 2^62: the number of one lease acquisition in a scope
-- holder     identity of that one acquisition (a UUID), not of a host
-- source     who issues a scope's tokens: 'lease' (built in) or the name of a foreign lease service
-- watermark  greatest token accepted in a scope; it never falls (a rebase begins a new era)
-- seq        1, 2, 3 … per scope, without gaps, in commit order
--
-- ── What a worker does ─────────────────────────────────────────────────────────────────────────────
-- Always: BEGIN IMMEDIATE; fence first, business writes next, the command last; COMMIT.
--
-- Without any lease (a plain outbox): token 1.
--     BEGIN IMMEDIATE;
--     UPDATE orders SET paid = 1 WHERE id = 17;
--     INSERT INTO outbox(scope, token, kind, destination, payload)
--       VALUES ('order/17', 1, 'webhook', 'billing', '{"paid":true}');
--     COMMIT;
--
-- With the built-in lease: acquire once, then fence each transaction. A holder is one acquisition, so
-- make a new UUID for each. A refused acquire undoes its whole transaction: one scope at a time.
--     BEGIN IMMEDIATE;
--     INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('order/17', :uuid, 30000);
--     SELECT token FROM outbox_lease WHERE scope = 'order/17' AND holder = :uuid;     -- say, 42
--     SELECT * FROM outbox_backlog WHERE scope = 'order/17';             -- inherited commands
--     COMMIT;
--
--     BEGIN IMMEDIATE;
--     INSERT INTO outbox_fence(scope, token, holder) VALUES ('order/17', 42, :uuid);
--     UPDATE orders SET paid = 1 WHERE id = 17;
--     INSERT INTO outbox(scope, token, holder, kind, destination, payload)
--       VALUES ('order/17', 42, :uuid, 'webhook', 'billing', '{"paid":true}');
--     COMMIT;
--     INSERT INTO outbox_renew(scope, token, holder, ttl_ms) VALUES ('order/17', 42, :uuid, 30000);
--     INSERT INTO outbox_release(scope, token, holder) VALUES ('order/17', 42, :uuid);
--
-- With a foreign lease service: seal is the first thing that a new holder does, before it reads
-- anything. Without it an old holder is still accepted until the new one writes.
--     INSERT INTO outbox_seal(scope, token, holder, source) VALUES ('order/17', 5012, :uuid, 'etcd-a');
--
-- What becomes of older commands at a take-over is policy, of all scopes or of one: 'deliver' sends them first,
-- 'discard' ends what can still be ended, 'review' parks what waits until somebody says what to do.
--     UPDATE outbox_policy SET on_takeover = 'review';
--     UPDATE outbox_scope SET on_takeover = 'discard' WHERE scope = 'order/17';
-- The current holder says so with the id of outbox_backlog: adopt or discard a parked command, cancel one that
-- waits. Saying a parked command again, under its key or id, adopts it too. After a rebase name the source.
--     INSERT INTO outbox_adopt(scope, token, holder, id)   VALUES ('order/17', 42, :uuid, :id);
--     INSERT INTO outbox_discard(scope, token, holder, id) VALUES ('order/17', 42, :uuid, :id);
--     INSERT INTO outbox_cancel(scope, token, holder, id)  VALUES ('order/17', 42, :uuid, :id);
--
-- What became of the commands, in order: handle each row once, and keep the last n with what you did.
--     SELECT * FROM outbox_event WHERE n > :last ORDER BY n LIMIT 100;
--
-- Repeating after an unclear COMMIT: give a key of your own. The same key with the same content inserts
-- nothing and succeeds. An ignored insert returns no row and leaves last_insert_rowid() as it was, so
-- read the command back by (scope, key).
--     INSERT INTO outbox(scope, token, key, kind, destination, payload)
--       VALUES ('order/17', 42, 'paid-17', 'webhook', 'billing', '{"paid":true}');
--     SELECT id, seq, state FROM outbox_status WHERE scope = 'order/17' AND key = 'paid-17';
--
-- ── After an error ─────────────────────────────────────────────────────────────────────────────────
-- Any error of these statements ends the transaction: a code below has rolled it back already, and a
-- value of the wrong type ('11abc', 11.5, a blob, 2^63) is refused by STRICT in SQLite's own words and
-- rolls nothing back. So leave the transaction function, or ROLLBACK and close the connection. What is
-- sent on the connection after a refusal commits by itself, outside the refused transaction.
-- "database is locked": begin again from the start, with BEGIN IMMEDIATE; never repeat one statement.
--
-- Codes stand in the message; search for \bFP0\d\d\b anywhere, since drivers put text before it.
--   FP001 stale token                     somebody newer took the scope over: stop working for it
--   FP002 token belongs to another holder two holders have one number: check the lease service
--   FP003 illegal value                   see the columns below
--   FP005 id exists with other content    also: in another scope, with another key, ended for good, or pruned
--   FP006 command is immutable            insert another one instead
--   FP007 command is live                 it can't be deleted, cancelled (too late), adopted or discarded now
--   FP008 number may not fall             watermark, seq, attempt number, epoch
--   FP009 token was never sealed          the lease never issued it, or require_seal wants a seal first
--   FP010 key exists with other content   the key names a different command
--   FP011 command is final                it ended; make a new one
--   FP012 token jumps too far             more than max_jump above the watermark, or the range is used up
--   FP013 lease is held, or not of this kind
--   FP014 other source                    the scope's tokens come from another source
-- In an INSERT into outbox or into a view every code undoes the whole transaction. In a write by hand to a
-- table other than outbox, and in an UPDATE or DELETE, it undoes its statement only.

-- ── Tables ─────────────────────────────────────────────────────────────────────────────────────────

-- One row is one command, as its writer gave it. Nothing in it ever changes.
-- In every optional column an explicit NULL means "not given".
CREATE TABLE outbox(
  n             INTEGER PRIMARY KEY AUTOINCREMENT, -- leave it out. It decides nothing: order is seq. It never comes back:
                                                   --   an attempt that is still open names its command by it
  id            TEXT UNIQUE DEFAULT (lower(hex(randomblob(16)))), -- optional: 1 to 64 of [A-Za-z0-9_-], unique; after prune remembered for key_retention
  scope         TEXT NOT NULL,        -- 1 to 255 bytes, no control characters (so for every name below)
  token         INTEGER NOT NULL,     -- 1 to 2^62
  holder        TEXT,                 -- optional; without one, the uniqueness of tokens is the lease service's duty
  source        TEXT,                 -- optional: the name of a foreign lease service
  lane          TEXT,                 -- optional, '' unless given; may be empty
  key           TEXT,                 -- optional: your own idempotency key, unique in its scope
  kind          TEXT NOT NULL,        -- 'webhook', 'email', or one that the application registered
  destination   TEXT NOT NULL,        -- a name of the configuration, or a URL where it allows them
  not_before_ms INTEGER,              -- optional: milliseconds since 1970, 10^11 to 10^13
  expires_at_ms INTEGER,              -- optional: the same; past it a waiting command ends as expired
  traceparent   TEXT,                 -- optional: W3C trace context
  reissue_of    TEXT,                 -- optional: the id of the finished command that this one was made from
  headers       TEXT,                 -- optional: a JSON object of texts; JSON null means none
  payload       TEXT,                 -- exactly one of payload and payload_bytes,
  payload_bytes BLOB                  --   at most max_payload bytes (1 MiB)
) STRICT;

-- What the database must know, one row. The same columns on outbox_scope override it; NULL = this one.
CREATE TABLE outbox_policy(
  one           INTEGER PRIMARY KEY,
  on_takeover   TEXT NOT NULL,        -- older commands when a watermark rises: 'deliver', 'discard', 'review'
  require_seal  INTEGER NOT NULL,     -- 1: a greater token must be sealed before it may write
  max_jump      INTEGER NOT NULL,     -- how far a later token of a foreign source may jump
  max_payload   INTEGER NOT NULL,     -- bytes, of payload and of headers
  key_retention INTEGER NOT NULL      -- milliseconds for which ids and keys outlive their commands
) STRICT;
INSERT INTO outbox_policy VALUES (1, 'deliver', 0, 1099511627776, 1048576, 2592000000);

-- One row a scope, never deleted.
CREATE TABLE outbox_scope(
  scope         TEXT NOT NULL PRIMARY KEY,
  source        TEXT,
  watermark     INTEGER NOT NULL,
  holder        TEXT,
  era           INTEGER NOT NULL DEFAULT 0,  -- raised by a rebase
  next_seq      INTEGER NOT NULL DEFAULT 1,
  pruned_seq    INTEGER NOT NULL DEFAULT 0,  -- commands up to here may be gone
  granted_ms    INTEGER,              -- when the lease was granted or last renewed
  until_ms      INTEGER,              -- when it runs out; NULL: no lease, or released
  on_takeover   TEXT,
  require_seal  INTEGER,
  max_jump      INTEGER,
  max_payload   INTEGER,
  key_retention INTEGER
) STRICT, WITHOUT ROWID;

-- Where each command stands; written by triggers and by the dispatcher. Read outbox_status instead.
CREATE TABLE outbox_state(
  n                INTEGER PRIMARY KEY,
  scope            TEXT NOT NULL,
  lane             TEXT NOT NULL,
  seq              INTEGER NOT NULL,
  era              INTEGER NOT NULL,
  token            INTEGER NOT NULL,
  minted_id        TEXT,              -- the id, where the writer gave an explicit NULL
  key              TEXT,              -- NULL once given back
  state            TEXT NOT NULL,     -- pending, sending, in_doubt, parked; delivered, dead
  reason           TEXT,              -- of dead: fenced, refused, exhausted, invalid, superseded, cancelled, expired, abandoned
  why              TEXT,              -- of dead without an attempt: what the first look found
  effect           TEXT NOT NULL DEFAULT 'none',   -- none, possible, done; never goes back
  attempt_no       INTEGER NOT NULL DEFAULT 0,     -- never reused
  tries            INTEGER NOT NULL DEFAULT 0,     -- what max_attempts limits
  fresh_no         INTEGER NOT NULL DEFAULT 0,     -- attempt_no at which tries and windows began anew
  found_open       INTEGER NOT NULL DEFAULT 0,     -- starts that found an attempt open
  found_row        INTEGER NOT NULL DEFAULT 0,     -- … in a row
  found_epoch      INTEGER NOT NULL DEFAULT 0,     -- … the last of them
  due_ms           INTEGER NOT NULL,               -- when it may be begun next, as far as its lane lets it
  set_ms           INTEGER NOT NULL,               -- the clock when due_ms was computed
  inserted_ms      INTEGER NOT NULL,
  updated_ms       INTEGER NOT NULL,
  first_begun_ms   INTEGER,                        -- max_age counts from here
  first_unknown_ms INTEGER,                        -- resend_window counts from here
  adopted_era      INTEGER,                        -- era and watermark of the scope when it was adopted
  adopted_token    INTEGER,
  erased_ms        INTEGER                         -- when payload and headers were erased
) STRICT;
-- SQLite uses a partial index only where the query repeats its WHERE word by word.
CREATE UNIQUE INDEX outbox_state_seq    ON outbox_state(scope, seq);
CREATE UNIQUE INDEX outbox_state_key    ON outbox_state(scope, key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX outbox_state_minted ON outbox_state(minted_id) WHERE minted_id IS NOT NULL;
CREATE INDEX outbox_state_live    ON outbox_state(scope, lane, seq) WHERE state IN ('pending', 'sending', 'in_doubt', 'parked');
CREATE INDEX outbox_state_dead    ON outbox_state(reason, updated_ms) WHERE state = 'dead';
CREATE INDEX outbox_state_waits   ON outbox_state(state, updated_ms) WHERE state IN ('in_doubt', 'parked', 'sending');
CREATE INDEX outbox_state_suspect ON outbox_state(n) WHERE found_row >= 2 AND state = 'pending';

-- One row a lane: its head is the only command of it that may be sent.
CREATE TABLE outbox_lane(
  scope       TEXT NOT NULL,
  lane        TEXT NOT NULL,
  head_n      INTEGER,                -- the lowest live seq
  kind        TEXT,                   -- of the head
  destination TEXT,
  due_ms      INTEGER,                -- when the head is to be looked at; NULL: it waits for somebody
  set_ms      INTEGER,
  begun_era   INTEGER NOT NULL DEFAULT 0,
  begun_token INTEGER NOT NULL DEFAULT 0,  -- the greatest (era, token, seq) that was begun
  begun_seq   INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (scope, lane)
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_lane_due ON outbox_lane(kind, destination, due_ms) WHERE due_ms IS NOT NULL;

-- One row an attempt, written before it starts.
CREATE TABLE outbox_attempt(
  n          INTEGER NOT NULL,
  attempt_no INTEGER NOT NULL,
  epoch      INTEGER NOT NULL,        -- of the dispatcher that made it
  on_unknown TEXT NOT NULL,           -- the policy it was begun under: hold, resend
  begun_ms   INTEGER NOT NULL,
  armed_ms   INTEGER,                 -- from here on the effect is possible
  settled_ms INTEGER,                 -- NULL: open
  outcome    TEXT,                    -- delivered, deferred, refused, unknown
  evidence   TEXT,                    -- what was seen, as JSON
  PRIMARY KEY (n, attempt_no)
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_attempt_open ON outbox_attempt(n) WHERE settled_ms IS NULL;

-- The dispatcher's reign, one row.
CREATE TABLE outbox_dispatcher(
  one        INTEGER PRIMARY KEY,
  epoch      INTEGER NOT NULL,
  started_ms INTEGER,
  host       TEXT,
  pid        INTEGER,
  attempts   INTEGER NOT NULL DEFAULT 0, -- begun ever; fewer than were seen once: an old copy
  attempts_pruned INTEGER NOT NULL DEFAULT 0, -- those of commands that are gone
  file       TEXT,                    -- the file that is dispatched from: host, file system, device, inode, birth
  copied_ms  INTEGER                  -- when it was made as a copy, which sends nothing until somebody says what it is
) STRICT;
INSERT INTO outbox_dispatcher(one, epoch) VALUES (1, 0);

-- Refusals that library, CLI and others report: one row a scope.
CREATE TABLE outbox_refusal(
  scope     TEXT NOT NULL PRIMARY KEY,
  token     INTEGER NOT NULL,         -- refused last
  watermark INTEGER NOT NULL,         -- at that time
  count     INTEGER NOT NULL,
  last_ms   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What is paused: a destination, a scope, or, with '' everywhere, everything.
CREATE TABLE outbox_pause(
  kind        TEXT NOT NULL,
  destination TEXT NOT NULL,
  scope       TEXT NOT NULL,
  until_ms    INTEGER,                -- NULL: until it is resumed
  at_ms       INTEGER NOT NULL,
  who         TEXT NOT NULL,
  reason      TEXT NOT NULL,
  PRIMARY KEY (kind, destination, scope)
) STRICT, WITHOUT ROWID;

-- Ids and keys that outlive their commands, after prune or erasure.
CREATE TABLE outbox_used(
  id       TEXT NOT NULL PRIMARY KEY,
  scope    TEXT NOT NULL,
  key      TEXT,                      -- NULL: none, or given back
  sha256   BLOB NOT NULL,             -- of the content
  until_ms INTEGER NOT NULL           -- forgotten after this
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX outbox_used_key ON outbox_used(scope, key) WHERE key IS NOT NULL;
CREATE INDEX outbox_used_until ON outbox_used(until_ms);

-- The outcome feed, in commit order: read WHERE n > the last n that you have handled, ORDER BY n. No row
-- can appear behind a later one. Numbers are never used again; gaps mean nothing.
CREATE TABLE outbox_event(
  n      INTEGER PRIMARY KEY AUTOINCREMENT,
  at_ms  INTEGER NOT NULL,
  event  TEXT NOT NULL,               -- delivered, dead, in_doubt, parked, resumed (a person's or a holder's word made it pending)
  id     TEXT NOT NULL,
  scope  TEXT NOT NULL,
  lane   TEXT NOT NULL,
  seq    INTEGER NOT NULL,
  key    TEXT,
  reason TEXT,
  effect TEXT NOT NULL
) STRICT;

-- What operators did. Rows are only added.
CREATE TABLE outbox_audit(
  n      INTEGER PRIMARY KEY,
  at_ms  INTEGER NOT NULL,
  who    TEXT NOT NULL,
  verb   TEXT NOT NULL,
  id     TEXT,
  scope  TEXT,
  reason TEXT NOT NULL,
  before TEXT,
  after  TEXT
) STRICT;

-- Version of this contract. Within a major version upgrades only add.
CREATE TABLE outbox_meta(
  one        INTEGER PRIMARY KEY,
  major      INTEGER NOT NULL,
  minor      INTEGER NOT NULL,
  uuid       TEXT NOT NULL,           -- of this database
  created_ms INTEGER NOT NULL
) STRICT;
INSERT INTO outbox_meta VALUES (1, 1, 0, lower(hex(randomblob(16))), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER));

-- ── Views to read ──────────────────────────────────────────────────────────────────────────────────
-- The _text columns are for languages without 64-bit integers.

-- Every scope and its current token. until_ms NULL: no lease, or released; an expired one keeps it.
CREATE VIEW outbox_lease(scope, token, token_text, holder, source, granted_ms, until_ms) AS
  SELECT scope, watermark, CAST(watermark AS TEXT), holder, source, granted_ms, until_ms FROM outbox_scope;

-- Every command. key is NULL once given back, due_ms unless pending. Read it by scope, by scope and key,
-- or by n = (SELECT n FROM outbox WHERE id = …); a filter on id alone reads every row.
CREATE VIEW outbox_status(n, id, scope, lane, seq, seq_text, token, token_text, holder, source, key, kind, destination, state, reason,
    effect, attempt_no, tries, inserted_ms, due_ms, expires_at_ms, updated_ms) AS
  SELECT x.n, coalesce(o.id, x.minted_id), x.scope, x.lane, x.seq, CAST(x.seq AS TEXT), x.token, CAST(x.token AS TEXT), o.holder, o.source, x.key,
    o.kind, o.destination, x.state, x.reason,
    CASE WHEN x.state = 'sending' AND x.effect = 'none' AND EXISTS (SELECT 1 FROM outbox_attempt a
           WHERE a.n = x.n AND a.attempt_no = x.attempt_no AND a.armed_ms IS NOT NULL) THEN 'possible' ELSE x.effect END,
    x.attempt_no, x.tries, x.inserted_ms, CASE x.state WHEN 'pending' THEN x.due_ms END, o.expires_at_ms, x.updated_ms
  FROM outbox_state x JOIN outbox o ON o.n = x.n;

-- The live commands whose token is below the watermark, by scope and seq: what a new holder inherits.
-- By the index of the live ones, so that ten million finished commands of a scope cost nothing.
CREATE VIEW outbox_backlog AS
  SELECT u.* FROM outbox_scope s JOIN outbox_state x INDEXED BY outbox_state_live ON x.scope = s.scope JOIN outbox_status u ON u.n = x.n AND u.scope = x.scope
  WHERE x.state IN ('pending', 'sending', 'in_doubt', 'parked') AND (x.era < s.era OR x.token < s.watermark)
  ORDER BY x.scope, x.seq;

-- ── Admission ──────────────────────────────────────────────────────────────────────────────────────
-- Inside a trigger never INSERT OR …: the outer statement's conflict clause would take its place.

-- The fence itself, once, for an insert, a fence and a seal. Workers use those instead.
CREATE VIEW outbox_claim(scope, token, holder, source, seals) AS SELECT scope, watermark, holder, source, 0 FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_claim_do INSTEAD OF INSERT ON outbox_claim BEGIN
  -- A view has no affinity. A whole REAL counts as its integer: some drivers bind every number so.
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE typeof(NEW.scope) <> 'text' OR typeof(NEW.holder) NOT IN ('text', 'null')
    OR typeof(NEW.source) NOT IN ('text', 'null')
    OR NOT (typeof(NEW.token) = 'integer' OR (typeof(NEW.token) = 'real' AND abs(NEW.token) < 9007199254740992.0 AND NEW.token = CAST(NEW.token AS INTEGER)))
    OR NEW.token < 1 OR NEW.token > 4611686018427387904
    OR length(CAST(NEW.scope AS BLOB)) NOT BETWEEN 1 AND 255
    OR length(CAST(NEW.holder AS BLOB)) NOT BETWEEN 1 AND 255
    OR length(CAST(NEW.source AS BLOB)) NOT BETWEEN 1 AND 255
    -- Text functions stop at NUL, so NUL is looked for first. The pattern is *[U+0001-U+001F U+007F-U+009F]*.
    OR instr(CAST(NEW.scope || coalesce(NEW.holder, '') || coalesce(NEW.source, '') AS BLOB), x'00')
    OR NEW.scope || coalesce(NEW.holder, '') || coalesce(NEW.source, '') GLOB CAST(x'2a5b012d1f7f2dc29f5d2a' AS TEXT);
  SELECT CASE
      WHEN NEW.seals IS 1 AND s.source = 'lease' THEN RAISE(ROLLBACK, 'FP013 lease is held, or not of this kind')
      WHEN NEW.source = 'lease' AND s.source IS NOT 'lease' THEN RAISE(ROLLBACK, 'FP013 lease is held, or not of this kind')
      WHEN NEW.source <> s.source THEN RAISE(ROLLBACK, 'FP014 other source')
      WHEN NEW.source IS NULL AND s.era > 0 THEN RAISE(ROLLBACK, 'FP014 other source')
      WHEN NEW.token < s.watermark THEN RAISE(ROLLBACK, 'FP001 stale token')
      WHEN NEW.token = s.watermark AND NEW.holder <> s.holder THEN RAISE(ROLLBACK, 'FP002 token belongs to another holder')
      WHEN NEW.token > coalesce(s.watermark, 0) AND NEW.seals IS NOT 1 AND (s.source = 'lease' OR coalesce(s.require_seal, p.require_seal))
        THEN RAISE(ROLLBACK, 'FP009 token was never sealed')
      WHEN s.watermark > 0 AND NEW.token - s.watermark > coalesce(s.max_jump, p.max_jump) THEN RAISE(ROLLBACK, 'FP012 token jumps too far')
    END
    FROM outbox_policy p LEFT JOIN outbox_scope s ON s.scope = NEW.scope;
  INSERT INTO outbox_scope(scope, source, watermark, holder)
    SELECT NEW.scope, NEW.source, CAST(NEW.token AS INTEGER), NEW.holder WHERE NOT EXISTS (SELECT 1 FROM outbox_scope WHERE scope = NEW.scope);
  -- Raise, bind, fix the source: only where something changes. A raise stores the given holder, none included.
  UPDATE outbox_scope SET holder = CASE WHEN NEW.token > watermark THEN NEW.holder ELSE coalesce(holder, NEW.holder) END,
      source = coalesce(source, NEW.source), watermark = CAST(NEW.token AS INTEGER)
    WHERE scope = NEW.scope AND (NEW.token > watermark OR (holder IS NULL AND NEW.holder IS NOT NULL) OR (source IS NULL AND NEW.source IS NOT NULL));
END;

CREATE TRIGGER outbox_admit BEFORE INSERT ON outbox BEGIN
  -- NEW.n is -1 where none was given (or where -1 was: the AFTER trigger sees that).
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE NEW.scope IS NULL OR NEW.token IS NULL OR NEW.kind IS NULL OR NEW.destination IS NULL
    OR (NEW.payload IS NULL) = (NEW.payload_bytes IS NULL)
    OR NEW.not_before_ms NOT BETWEEN 100000000000 AND 10000000000000
    OR NEW.expires_at_ms NOT BETWEEN 100000000000 AND 10000000000000
    OR NEW.id = '' OR length(CAST(NEW.id AS BLOB)) > 64 OR instr(CAST(NEW.id AS BLOB), x'00') OR NEW.id GLOB '*[^A-Za-z0-9_-]*'
    OR length(CAST(NEW.kind AS BLOB)) NOT BETWEEN 1 AND 255 OR length(CAST(NEW.destination AS BLOB)) NOT BETWEEN 1 AND 255
    OR NEW.reissue_of = '' OR length(CAST(NEW.reissue_of AS BLOB)) > 64 OR instr(CAST(NEW.reissue_of AS BLOB), x'00') OR NEW.reissue_of GLOB '*[^A-Za-z0-9_-]*'
    OR length(CAST(NEW.lane AS BLOB)) > 255 OR length(CAST(NEW.key AS BLOB)) NOT BETWEEN 1 AND 255 OR length(CAST(NEW.traceparent AS BLOB)) > 255
    OR instr(CAST(NEW.kind || NEW.destination || coalesce(NEW.lane, '') || coalesce(NEW.key, '') AS BLOB), x'00')
    OR NEW.kind || NEW.destination || coalesce(NEW.lane, '') || coalesce(NEW.key, '') GLOB CAST(x'2a5b012d1f7f2dc29f5d2a' AS TEXT)
    OR max(length(CAST(coalesce(NEW.payload, NEW.payload_bytes) AS BLOB)), length(CAST(coalesce(NEW.headers, '') AS BLOB))) >
       coalesce((SELECT max_payload FROM outbox_scope WHERE scope = NEW.scope), (SELECT max_payload FROM outbox_policy))
    OR (NEW.n IS NOT NULL AND NEW.n <> -1 AND NOT EXISTS (SELECT 1 FROM outbox o JOIN outbox_state x ON x.n = o.n
         WHERE o.n = NEW.n AND coalesce(o.id, x.minted_id) = NEW.id AND o.scope = NEW.scope AND x.lane = coalesce(NEW.lane, '') AND o.kind = NEW.kind
         AND o.destination = NEW.destination AND CAST(coalesce(o.payload, o.payload_bytes) AS BLOB) = CAST(coalesce(NEW.payload, NEW.payload_bytes) AS BLOB)
         AND CASE WHEN trim(o.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(o.headers AS BLOB) END
          IS CASE WHEN trim(NEW.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(NEW.headers AS BLOB) END));
  -- The fence comes before idempotency: a stale worker is refused even if its command exists already.
  INSERT INTO outbox_claim(scope, token, holder, source, seals) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.source, 0);
  -- Pruned and erased ids don't come back within key_retention.
  SELECT RAISE(ROLLBACK, 'FP005 id exists with other content') FROM outbox_used WHERE id = NEW.id;
  -- A repeat adopts the command that a review parked. If its content differs, the refusal below undoes this too.
  UPDATE outbox_state SET state = 'pending', tries = 0, found_open = 0, found_row = 0, fresh_no = attempt_no,
      first_begun_ms = NULL, first_unknown_ms = NULL, (adopted_era, adopted_token) = (SELECT era, watermark FROM outbox_scope WHERE scope = NEW.scope),
      due_ms = max(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), coalesce((SELECT not_before_ms FROM outbox o WHERE o.n = outbox_state.n), 0)),
      set_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), updated_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE state = 'parked' AND reason IS NULL AND n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id),
      (SELECT n FROM outbox_state WHERE scope = NEW.scope AND key = NEW.key));
  -- Id first, then key. RAISE(IGNORE) skips the row and keeps what the fence wrote.
  SELECT CASE WHEN x.scope = NEW.scope AND NOT (x.state = 'dead' AND x.reason IN ('superseded', 'expired', 'fenced') AND x.effect = 'none')
        AND (NEW.key IS NULL OR x.key IS NEW.key) AND x.lane = coalesce(NEW.lane, '') AND o.kind = NEW.kind AND o.destination = NEW.destination
        AND CAST(coalesce(o.payload, o.payload_bytes) AS BLOB) = CAST(coalesce(NEW.payload, NEW.payload_bytes) AS BLOB)
        AND CASE WHEN trim(o.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(o.headers AS BLOB) END
         IS CASE WHEN trim(NEW.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(NEW.headers AS BLOB) END
      THEN RAISE(IGNORE) ELSE RAISE(ROLLBACK, 'FP005 id exists with other content') END
    FROM outbox_state x JOIN outbox o ON o.n = x.n
    WHERE x.n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id));
  -- Of a pruned or erased command the content can't be compared any more: its key is a repeat, whatever it says.
  SELECT RAISE(IGNORE) FROM outbox_used u WHERE u.scope = NEW.scope AND u.key = NEW.key
    AND NOT EXISTS (SELECT 1 FROM outbox_state WHERE scope = NEW.scope AND key = NEW.key AND erased_ms IS NULL);
  SELECT CASE WHEN x.lane = coalesce(NEW.lane, '') AND o.kind = NEW.kind AND o.destination = NEW.destination
        AND CAST(coalesce(o.payload, o.payload_bytes) AS BLOB) = CAST(coalesce(NEW.payload, NEW.payload_bytes) AS BLOB)
        AND CASE WHEN trim(o.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(o.headers AS BLOB) END
         IS CASE WHEN trim(NEW.headers, ' ' || char(9, 10, 13)) <> 'null' THEN CAST(NEW.headers AS BLOB) END
      THEN RAISE(IGNORE) ELSE RAISE(ROLLBACK, 'FP010 key exists with other content') END
    FROM outbox_state x JOIN outbox o ON o.n = x.n WHERE x.scope = NEW.scope AND x.key = NEW.key;
END;

-- seq is given after the row is in, so that an ignored row leaves no gap.
CREATE TRIGGER outbox_number AFTER INSERT ON outbox BEGIN
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE NEW.n < 1;
  -- A trigger of somebody else's may have come in between and raised the watermark, or kept the fence from firing.
  SELECT RAISE(ROLLBACK, 'FP001 stale token') WHERE NEW.token IS NOT (SELECT watermark FROM outbox_scope WHERE scope = NEW.scope);
  INSERT INTO outbox_state(n, scope, lane, seq, era, token, minted_id, key, state, due_ms, set_ms, inserted_ms, updated_ms)
    SELECT NEW.n, NEW.scope, coalesce(NEW.lane, ''), s.next_seq, s.era, NEW.token, CASE WHEN NEW.id IS NULL THEN lower(hex(randomblob(16))) END, NEW.key,
        'pending', coalesce(NEW.not_before_ms, t.now_ms), t.now_ms, t.now_ms, t.now_ms
      FROM outbox_scope s, (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now_ms) t WHERE s.scope = NEW.scope;
  UPDATE outbox_scope SET next_seq = next_seq + 1 WHERE scope = NEW.scope;
  -- … or have inserted a command for which this trigger did not fire: it would never be sent.
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE NOT EXISTS (SELECT 1 FROM outbox_state WHERE n = (SELECT max(n) FROM outbox));
END;

-- ── Verbs of a holder, as views to insert into: an INSERT always says yes or no ────────────────────

-- Checks the token like an insert, raising included, without a command: first in every transaction.
CREATE VIEW outbox_fence(scope, token, holder, source) AS SELECT scope, watermark, holder, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_fence_do INSTEAD OF INSERT ON outbox_fence BEGIN
  INSERT INTO outbox_claim(scope, token, holder, source, seals) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.source, 0);
END;

-- Raises the watermark to one's own token, so that older holders are refused from then on.
CREATE VIEW outbox_seal(scope, token, holder, source) AS SELECT scope, watermark, holder, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_seal_do INSTEAD OF INSERT ON outbox_seal BEGIN
  INSERT INTO outbox_claim(scope, token, holder, source, seals) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.source, 1);
END;

-- What acquire, renew and release have in common: a scope and a holder, both given.
CREATE VIEW outbox_acquire(scope, holder, ttl_ms) AS SELECT scope, holder, until_ms - granted_ms FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_acquire_do INSTEAD OF INSERT ON outbox_acquire BEGIN
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE typeof(NEW.scope) <> 'text' OR typeof(NEW.holder) <> 'text'
    OR length(CAST(NEW.scope AS BLOB)) NOT BETWEEN 1 AND 255 OR length(CAST(NEW.holder AS BLOB)) NOT BETWEEN 1 AND 255
    OR instr(CAST(NEW.scope || NEW.holder AS BLOB), x'00') OR NEW.scope || NEW.holder GLOB CAST(x'2a5b012d1f7f2dc29f5d2a' AS TEXT)
    OR NOT (typeof(NEW.ttl_ms) = 'integer' OR (typeof(NEW.ttl_ms) = 'real' AND NEW.ttl_ms = CAST(NEW.ttl_ms AS INTEGER)))
    OR NEW.ttl_ms NOT BETWEEN 1 AND 2678400000;
  SELECT CASE
      WHEN s.source <> 'lease' THEN RAISE(ROLLBACK, 'FP013 lease is held, or not of this kind')
      -- Free from until_ms on, and when the grant lies in the future: the clock was set back.
      WHEN t.now_ms < s.until_ms AND t.now_ms >= s.granted_ms - 5000 THEN RAISE(ROLLBACK, 'FP013 lease is held, or not of this kind')
      WHEN s.holder = NEW.holder THEN RAISE(ROLLBACK, 'FP003 illegal value')
      WHEN s.watermark >= 4611686018427387904 THEN RAISE(ROLLBACK, 'FP012 token jumps too far')
    END
    FROM outbox_scope s, (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS now_ms) t WHERE s.scope = NEW.scope;
  INSERT INTO outbox_scope(scope, source, watermark) SELECT NEW.scope, 'lease', 0 WHERE NOT EXISTS (SELECT 1 FROM outbox_scope WHERE scope = NEW.scope);
  UPDATE outbox_scope SET source = 'lease', watermark = watermark + 1, holder = NEW.holder,
      granted_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
      until_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) + CAST(NEW.ttl_ms AS INTEGER)
    WHERE scope = NEW.scope;
END;

-- Renew and release: the scope is a lease scope, token and holder are its own. Renewing after expiry or
-- release revives the lease.
CREATE VIEW outbox_tenure(scope, token, holder) AS SELECT scope, watermark, holder FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_tenure_do INSTEAD OF INSERT ON outbox_tenure BEGIN
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE typeof(NEW.scope) <> 'text' OR typeof(NEW.holder) <> 'text' OR NEW.holder = ''
    OR NOT (typeof(NEW.token) = 'integer' OR (typeof(NEW.token) = 'real' AND abs(NEW.token) < 9007199254740992.0 AND NEW.token = CAST(NEW.token AS INTEGER)))
    OR NEW.token < 1 OR NEW.token > 4611686018427387904;
  SELECT CASE
      WHEN s.source IS NOT 'lease' THEN RAISE(ROLLBACK, 'FP013 lease is held, or not of this kind')
      WHEN NEW.token > s.watermark THEN RAISE(ROLLBACK, 'FP009 token was never sealed')
      WHEN NEW.token < s.watermark THEN RAISE(ROLLBACK, 'FP001 stale token')
      WHEN NEW.holder <> s.holder THEN RAISE(ROLLBACK, 'FP002 token belongs to another holder')
    END FROM outbox_policy p LEFT JOIN outbox_scope s ON s.scope = NEW.scope;
END;

CREATE VIEW outbox_renew(scope, token, holder, ttl_ms) AS SELECT scope, watermark, holder, until_ms - granted_ms FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_renew_do INSTEAD OF INSERT ON outbox_renew BEGIN
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE
    NOT (typeof(NEW.ttl_ms) = 'integer' OR (typeof(NEW.ttl_ms) = 'real' AND NEW.ttl_ms = CAST(NEW.ttl_ms AS INTEGER)))
    OR NEW.ttl_ms NOT BETWEEN 1 AND 2678400000;
  INSERT INTO outbox_tenure(scope, token, holder) VALUES (NEW.scope, NEW.token, NEW.holder);
  UPDATE outbox_scope SET granted_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
      until_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) + CAST(NEW.ttl_ms AS INTEGER)
    WHERE scope = NEW.scope;
END;

CREATE VIEW outbox_release(scope, token, holder) AS SELECT scope, watermark, holder FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_release_do INSTEAD OF INSERT ON outbox_release BEGIN
  INSERT INTO outbox_tenure(scope, token, holder) VALUES (NEW.scope, NEW.token, NEW.holder);
  UPDATE outbox_scope SET until_ms = NULL WHERE scope = NEW.scope;
END;

-- Cancel ends a command that waits, or that was begun and may not send yet. Adopt sends a parked one after
-- all, with fresh tries, not before its not_before_ms; discard ends it. All are checked like an insert, raising
-- included, and a refusal (FP003: no such command here; FP007: it is not parked, may have been sent already, or
-- waits for an answer; FP011: it ended) undoes the transaction.
CREATE VIEW outbox_verdict(scope, token, holder, id, source, verb) AS SELECT scope, watermark, holder, holder, source, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_verdict_do INSTEAD OF INSERT ON outbox_verdict BEGIN
  INSERT INTO outbox_claim(scope, token, holder, source, seals) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.source, 0);
  SELECT RAISE(ROLLBACK, 'FP003 illegal value') WHERE typeof(NEW.id) <> 'text' OR coalesce(NEW.verb, '') NOT IN ('cancel', 'adopt', 'discard')
    OR NEW.scope IS NOT (SELECT scope FROM outbox_state WHERE n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id)));
  SELECT CASE
      WHEN x.state IN ('delivered', 'dead') THEN RAISE(ROLLBACK, 'FP011 command is final')
      WHEN NEW.verb <> 'cancel' AND x.state <> 'parked' THEN RAISE(ROLLBACK, 'FP007 command is live')
      WHEN x.state = 'in_doubt' THEN RAISE(ROLLBACK, 'FP007 command is live')
      WHEN x.state = 'sending' AND NOT EXISTS (SELECT 1 FROM outbox_attempt a
        WHERE a.n = x.n AND a.attempt_no = x.attempt_no AND a.armed_ms IS NULL AND a.settled_ms IS NULL) THEN RAISE(ROLLBACK, 'FP007 command is live')
    END
    FROM outbox_state x WHERE x.n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id));
  UPDATE outbox_attempt SET settled_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), outcome = 'deferred', evidence = '{"phase":"recalled"}'
    WHERE settled_ms IS NULL AND n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id));
  -- A key comes back where the effect certainly did not happen and nobody but a take-over ended the command.
  UPDATE outbox_state SET state = 'dead', updated_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
      reason = CASE NEW.verb WHEN 'cancel' THEN 'cancelled' ELSE coalesce(reason, 'superseded') END,
      key = CASE WHEN NEW.verb = 'cancel' OR reason IS NOT NULL OR effect <> 'none' THEN key END
    WHERE NEW.verb <> 'adopt' AND n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id));
  UPDATE outbox_state SET state = 'pending', reason = NULL, tries = 0, found_open = 0, found_row = 0, fresh_no = attempt_no,
      first_begun_ms = NULL, first_unknown_ms = NULL, (adopted_era, adopted_token) = (SELECT era, watermark FROM outbox_scope WHERE scope = NEW.scope),
      due_ms = max(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), coalesce((SELECT not_before_ms FROM outbox o WHERE o.n = outbox_state.n), 0)),
      set_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), updated_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE NEW.verb = 'adopt' AND n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id));
END;
CREATE VIEW outbox_cancel(scope, token, holder, id, source) AS SELECT scope, watermark, holder, holder, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_cancel_do INSTEAD OF INSERT ON outbox_cancel BEGIN
  INSERT INTO outbox_verdict(scope, token, holder, id, source, verb) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.id, NEW.source, 'cancel');
END;
CREATE VIEW outbox_adopt(scope, token, holder, id, source) AS SELECT scope, watermark, holder, holder, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_adopt_do INSTEAD OF INSERT ON outbox_adopt BEGIN
  INSERT INTO outbox_verdict(scope, token, holder, id, source, verb) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.id, NEW.source, 'adopt');
END;
CREATE VIEW outbox_discard(scope, token, holder, id, source) AS SELECT scope, watermark, holder, holder, source FROM outbox_scope WHERE 0;
CREATE TRIGGER outbox_discard_do INSTEAD OF INSERT ON outbox_discard BEGIN
  INSERT INTO outbox_verdict(scope, token, holder, id, source, verb) VALUES (NEW.scope, NEW.token, NEW.holder, NEW.id, NEW.source, 'discard');
END;

-- ── Take-over: any raise of a watermark, from inside whatever raised it ────────────────────────────

-- Under 'discard' what waits ends, and what was begun and may not send yet is recalled; under 'review' what
-- is pending is parked. An armed attempt runs to its outcome. Every
-- command that is there when a watermark rises is older than it. Each raise looks at adopted commands again.
CREATE TRIGGER outbox_takeover AFTER UPDATE OF watermark ON outbox_scope WHEN NEW.watermark > OLD.watermark AND NEW.era = OLD.era
    AND coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) <> 'deliver'
BEGIN
  UPDATE outbox_attempt SET settled_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER), outcome = 'deferred', evidence = '{"phase":"recalled"}'
    WHERE settled_ms IS NULL AND armed_ms IS NULL AND coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) = 'discard'
      AND n IN (SELECT n FROM outbox_state WHERE scope = NEW.scope AND state IN ('pending', 'sending', 'in_doubt', 'parked') AND state = 'sending');
  UPDATE outbox_state SET state = 'dead', reason = 'superseded', key = CASE WHEN effect = 'none' THEN NULL ELSE key END,
      updated_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE scope = NEW.scope AND state IN ('pending', 'sending', 'in_doubt', 'parked')
      AND coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) = 'discard'
      AND (state IN ('pending', 'parked') OR (state = 'sending' AND NOT EXISTS (SELECT 1 FROM outbox_attempt a WHERE a.n = outbox_state.n AND a.settled_ms IS NULL)));
  UPDATE outbox_state SET state = 'parked', reason = NULL, updated_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE scope = NEW.scope AND state IN ('pending', 'sending', 'in_doubt', 'parked') AND state = 'pending'
      AND coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) = 'review';
END;

-- ── The outcome feed ───────────────────────────────────────────────────────────────────────────────

CREATE TRIGGER outbox_state_event AFTER UPDATE ON outbox_state
  WHEN NEW.state <> OLD.state AND (NEW.state IN ('delivered', 'dead', 'in_doubt', 'parked') OR (NEW.state = 'pending' AND OLD.state IN ('in_doubt', 'parked')))
BEGIN
  INSERT INTO outbox_event(at_ms, event, id, scope, lane, seq, key, reason, effect)
    SELECT NEW.updated_ms, CASE NEW.state WHEN 'pending' THEN 'resumed' ELSE NEW.state END, coalesce(o.id, NEW.minted_id), NEW.scope, NEW.lane, NEW.seq, o.key, NEW.reason, NEW.effect
      FROM outbox o WHERE o.n = NEW.n;
END;

-- ── Lane rows, kept by triggers so that every writer keeps them ────────────────────────────────────

-- A lane that has a head keeps it: what comes in stands behind it.
CREATE TRIGGER outbox_lane_enter AFTER INSERT ON outbox_state
  WHEN (SELECT head_n FROM outbox_lane WHERE scope = NEW.scope AND lane = NEW.lane) IS NULL
BEGIN
  INSERT INTO outbox_lane(scope, lane) SELECT NEW.scope, NEW.lane
    WHERE NOT EXISTS (SELECT 1 FROM outbox_lane WHERE scope = NEW.scope AND lane = NEW.lane);
  UPDATE outbox_lane SET head_n = NEW.n, kind = o.kind, destination = o.destination,
      due_ms = min(NEW.due_ms, coalesce(o.expires_at_ms, NEW.due_ms)), set_ms = NEW.set_ms
    FROM outbox o WHERE o.n = NEW.n AND outbox_lane.scope = NEW.scope AND outbox_lane.lane = NEW.lane;
END;

-- The head stays and its due time changes. One that is sending or in doubt waits for somebody; a parked
-- one is looked at when its time is over.
CREATE TRIGGER outbox_lane_wait AFTER UPDATE ON outbox_state
  WHEN NEW.state IN ('pending', 'sending', 'in_doubt', 'parked') AND (NEW.state <> OLD.state OR NEW.due_ms <> OLD.due_ms OR NEW.set_ms <> OLD.set_ms)
BEGIN
  UPDATE outbox_lane SET set_ms = NEW.set_ms, due_ms = CASE NEW.state
        WHEN 'pending' THEN min(NEW.due_ms, coalesce((SELECT expires_at_ms FROM outbox WHERE n = NEW.n), NEW.due_ms))
        WHEN 'parked' THEN (SELECT expires_at_ms FROM outbox WHERE n = NEW.n) END
    WHERE scope = NEW.scope AND lane = NEW.lane AND head_n = NEW.n;
END;

-- The head ended, and the next lowest live seq takes its place.
CREATE TRIGGER outbox_lane_leave AFTER UPDATE ON outbox_state WHEN NEW.state IN ('delivered', 'dead') AND NEW.state <> OLD.state BEGIN
  UPDATE outbox_lane SET (head_n, kind, destination, due_ms, set_ms) = (
      SELECT x.n, o.kind, o.destination,
          CASE x.state WHEN 'pending' THEN min(x.due_ms, coalesce(o.expires_at_ms, x.due_ms)) WHEN 'parked' THEN o.expires_at_ms END, x.set_ms
        FROM outbox_state x JOIN outbox o ON o.n = x.n
        WHERE x.scope = NEW.scope AND x.lane = NEW.lane AND x.state IN ('pending', 'sending', 'in_doubt', 'parked')
        ORDER BY x.seq LIMIT 1)
    WHERE scope = NEW.scope AND lane = NEW.lane AND head_n = NEW.n;
END;

-- ── Guards. REPLACE fires no delete trigger, so every unique key is checked before an insert; guards of
--    state raise ABORT, so that one of them never takes the whole group commit of the dispatcher with it.
--    They have no column list, which would not see rowid (outbox_scope has none), and compare values, so
--    that a second save of equal values passes. ───────────────────────────────────────────────────────────────────────────

CREATE TRIGGER outbox_immutable BEFORE UPDATE ON outbox WHEN NOT (NEW.n IS OLD.n AND NEW.id IS OLD.id AND NEW.scope IS OLD.scope
    AND NEW.token IS OLD.token AND NEW.holder IS OLD.holder AND NEW.source IS OLD.source AND NEW.lane IS OLD.lane AND NEW.key IS OLD.key
    AND NEW.kind IS OLD.kind AND NEW.destination IS OLD.destination AND NEW.not_before_ms IS OLD.not_before_ms
    AND NEW.expires_at_ms IS OLD.expires_at_ms AND NEW.traceparent IS OLD.traceparent
    AND NEW.reissue_of IS OLD.reissue_of
    -- Payload and headers of a finished command may be erased, once its content is remembered by its hash.
    AND ((NEW.headers IS OLD.headers AND NEW.payload IS OLD.payload AND NEW.payload_bytes IS OLD.payload_bytes)
      OR (NEW.headers IS NULL AND NEW.payload IS NULL AND NEW.payload_bytes IS NULL AND EXISTS (SELECT 1 FROM outbox_state x JOIN outbox_used u
        ON u.id = coalesce(OLD.id, x.minted_id) WHERE x.n = OLD.n AND x.erased_ms IS NOT NULL))))
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
-- A command goes by prune alone: final, at the front of its scope, remembered, its attempts gone; its state
-- goes last.
CREATE TRIGGER outbox_keep BEFORE DELETE ON outbox WHEN EXISTS (SELECT 1 FROM outbox_attempt WHERE n = OLD.n)
    OR NOT EXISTS (SELECT 1 FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope JOIN outbox_used u ON u.id = coalesce(OLD.id, x.minted_id)
      WHERE x.n = OLD.n AND x.state IN ('delivered', 'dead') AND x.seq <= s.pruned_seq)
BEGIN SELECT RAISE(ABORT, 'FP007 command is live'); END;

CREATE TRIGGER outbox_state_new BEFORE INSERT ON outbox_state WHEN EXISTS (SELECT 1 FROM outbox_state WHERE n = NEW.n)
    OR NEW.seq IS NOT (SELECT next_seq FROM outbox_scope WHERE scope = NEW.scope)
    OR (NEW.key IS NOT NULL AND EXISTS (SELECT 1 FROM outbox_state WHERE scope = NEW.scope AND key = NEW.key))
    OR (NEW.minted_id IS NOT NULL AND EXISTS (SELECT 1 FROM outbox_state WHERE minted_id = NEW.minted_id))
    OR NOT EXISTS (SELECT 1 FROM outbox WHERE n = NEW.n)
BEGIN SELECT RAISE(ABORT, 'FP005 id exists with other content'); END;
-- A NULL must not pass: under OR REPLACE it becomes the column's default, and under OR IGNORE nothing at all.
CREATE TRIGGER outbox_state_same BEFORE UPDATE ON outbox_state WHEN (NEW.n IS OLD.n AND NEW.scope IS OLD.scope AND NEW.lane IS OLD.lane
    AND NEW.seq IS OLD.seq AND NEW.era IS OLD.era AND NEW.token IS OLD.token AND NEW.minted_id IS OLD.minted_id
    AND NEW.inserted_ms IS OLD.inserted_ms AND (NEW.erased_ms IS OLD.erased_ms
      OR (OLD.erased_ms IS NULL AND EXISTS (SELECT 1 FROM outbox_used WHERE id = coalesce((SELECT id FROM outbox WHERE n = OLD.n), OLD.minted_id)))) AND (NEW.key IS NULL OR NEW.key IS OLD.key)
    AND NEW.state IN ('pending', 'sending', 'in_doubt', 'parked', 'delivered', 'dead') AND NEW.effect IN ('none', 'possible', 'done')) IS NOT TRUE
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_state_final BEFORE UPDATE ON outbox_state WHEN OLD.state IN ('delivered', 'dead')
    AND NOT (NEW.state IS OLD.state AND NEW.reason IS OLD.reason AND NEW.effect IS OLD.effect AND NEW.key IS OLD.key)
BEGIN SELECT RAISE(ABORT, 'FP011 command is final'); END;
CREATE TRIGGER outbox_state_rise BEFORE UPDATE ON outbox_state WHEN NEW.attempt_no IS NULL OR NEW.attempt_no < OLD.attempt_no
    OR NEW.tries IS NULL OR NEW.fresh_no IS NULL OR NEW.found_open IS NULL OR NEW.found_row IS NULL OR NEW.found_epoch IS NULL
    OR (OLD.effect = 'done' AND NEW.effect IS NOT 'done') OR (OLD.effect = 'possible' AND NEW.effect IS 'none')
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
-- A key is given back only where the effect certainly did not happen and the command will not be sent.
CREATE TRIGGER outbox_state_key_kept BEFORE UPDATE ON outbox_state WHEN NEW.key IS NULL AND OLD.key IS NOT NULL
    AND NOT (NEW.state IS 'dead' AND NEW.reason IN ('superseded', 'expired', 'fenced') AND NEW.effect IS 'none')
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_state_keep BEFORE DELETE ON outbox_state WHEN EXISTS (SELECT 1 FROM outbox WHERE n = OLD.n)
BEGIN SELECT RAISE(ABORT, 'FP007 command is live'); END;

CREATE TRIGGER outbox_scope_new BEFORE INSERT ON outbox_scope WHEN EXISTS (SELECT 1 FROM outbox_scope WHERE scope = NEW.scope)
    OR NEW.watermark IS NULL OR NEW.watermark NOT BETWEEN 0 AND 4611686018427387904
    OR NEW.next_seq IS NOT 1 OR NEW.era IS NOT 0 OR NEW.pruned_seq IS NOT 0
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
-- next_seq rises only over a number that was given, and a new era names its source.
CREATE TRIGGER outbox_scope_rise BEFORE UPDATE ON outbox_scope WHEN NEW.scope IS NOT OLD.scope OR NEW.watermark IS NULL
    OR NEW.watermark NOT BETWEEN 0 AND 4611686018427387904 OR NEW.next_seq IS NULL
    OR NEW.era IS NULL OR NEW.era NOT IN (OLD.era, OLD.era + 1) OR (NEW.watermark < OLD.watermark AND NEW.era = OLD.era)
    OR (NEW.era > OLD.era AND NEW.source IS NULL) OR NEW.next_seq NOT IN (OLD.next_seq, OLD.next_seq + 1)
    OR (NEW.next_seq > OLD.next_seq AND NOT EXISTS (SELECT 1 FROM outbox_state WHERE scope = OLD.scope AND seq = OLD.next_seq))
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
-- Only what is final may be pruned, from the front.
CREATE TRIGGER outbox_scope_prune BEFORE UPDATE OF pruned_seq ON outbox_scope WHEN NEW.pruned_seq IS NOT OLD.pruned_seq AND (NEW.pruned_seq IS NULL
    OR NEW.pruned_seq < OLD.pruned_seq OR NEW.pruned_seq >= OLD.next_seq
    OR EXISTS (SELECT 1 FROM outbox_state WHERE scope = OLD.scope AND seq > OLD.pruned_seq AND seq <= NEW.pruned_seq AND state NOT IN ('delivered', 'dead')))
BEGIN SELECT RAISE(ABORT, 'FP007 command is live'); END;
CREATE TRIGGER outbox_scope_bound BEFORE UPDATE OF holder ON outbox_scope WHEN OLD.holder IS NOT NULL AND NEW.holder IS NOT OLD.holder
    AND NEW.watermark IS OLD.watermark AND NEW.era IS OLD.era
BEGIN SELECT RAISE(ABORT, 'FP002 token belongs to another holder'); END;
CREATE TRIGGER outbox_scope_source BEFORE UPDATE OF source ON outbox_scope WHEN OLD.source IS NOT NULL AND NEW.source IS NOT OLD.source AND NEW.era IS OLD.era
BEGIN SELECT RAISE(ABORT, 'FP014 other source'); END;
CREATE TRIGGER outbox_scope_keep BEFORE DELETE ON outbox_scope BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;

CREATE TRIGGER outbox_lane_new BEFORE INSERT ON outbox_lane WHEN EXISTS (SELECT 1 FROM outbox_lane WHERE scope = NEW.scope AND lane = NEW.lane)
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_lane_rise BEFORE UPDATE ON outbox_lane WHEN NEW.scope IS NOT OLD.scope OR NEW.lane IS NOT OLD.lane
    OR NEW.begun_era IS NULL OR NEW.begun_token IS NULL OR NEW.begun_seq IS NULL
    OR (NEW.begun_era, NEW.begun_token, NEW.begun_seq) < (OLD.begun_era, OLD.begun_token, OLD.begun_seq)
    OR (NEW.head_n IS NULL AND OLD.head_n IS NOT NULL AND EXISTS (SELECT 1 FROM outbox_state WHERE scope = OLD.scope AND lane = OLD.lane
      AND state IN ('pending', 'sending', 'in_doubt', 'parked')))
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_lane_keep BEFORE DELETE ON outbox_lane BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;

CREATE TRIGGER outbox_attempt_new BEFORE INSERT ON outbox_attempt WHEN EXISTS (SELECT 1 FROM outbox_attempt WHERE n = NEW.n AND attempt_no >= NEW.attempt_no)
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_attempt_same BEFORE UPDATE ON outbox_attempt WHEN NOT (NEW.n IS OLD.n AND NEW.attempt_no IS OLD.attempt_no AND NEW.epoch IS OLD.epoch
    AND NEW.on_unknown IS OLD.on_unknown AND NEW.begun_ms IS OLD.begun_ms AND (OLD.armed_ms IS NULL OR NEW.armed_ms IS OLD.armed_ms)
    AND (OLD.settled_ms IS NULL OR (NEW.settled_ms IS OLD.settled_ms AND NEW.armed_ms IS OLD.armed_ms AND NEW.outcome IS OLD.outcome AND NEW.evidence IS OLD.evidence)))
BEGIN SELECT RAISE(ABORT, 'FP011 command is final'); END;
CREATE TRIGGER outbox_attempt_keep BEFORE DELETE ON outbox_attempt WHEN NOT EXISTS (SELECT 1 FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope
    WHERE x.n = OLD.n AND x.state IN ('delivered', 'dead') AND x.seq <= s.pruned_seq)
BEGIN SELECT RAISE(ABORT, 'FP007 command is live'); END;

CREATE TRIGGER outbox_policy_new BEFORE INSERT ON outbox_policy BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_policy_keep BEFORE DELETE ON outbox_policy BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_policy_legal BEFORE UPDATE ON outbox_policy WHEN NEW.one IS NOT 1 OR NEW.on_takeover IS NULL OR NEW.on_takeover NOT IN ('deliver', 'discard', 'review')
    OR NEW.require_seal IS NULL OR NEW.require_seal NOT IN (0, 1) OR NEW.max_jump IS NULL OR NEW.max_jump NOT BETWEEN 1 AND 4611686018427387904
    OR NEW.max_payload IS NULL OR NEW.max_payload NOT BETWEEN 1 AND 1000000000 OR NEW.key_retention IS NULL OR NEW.key_retention NOT BETWEEN 0 AND 3153600000000
BEGIN SELECT RAISE(ABORT, 'FP003 illegal value'); END;
CREATE TRIGGER outbox_scope_legal BEFORE UPDATE OF on_takeover, require_seal, max_jump, max_payload, key_retention ON outbox_scope
  WHEN NEW.on_takeover NOT IN ('deliver', 'discard', 'review')
    OR NEW.require_seal NOT IN (0, 1) OR NEW.max_jump NOT BETWEEN 1 AND 4611686018427387904
    OR NEW.max_payload NOT BETWEEN 1 AND 1000000000 OR NEW.key_retention NOT BETWEEN 0 AND 3153600000000
BEGIN SELECT RAISE(ABORT, 'FP003 illegal value'); END;
CREATE TRIGGER outbox_scope_first BEFORE INSERT ON outbox_scope WHEN NEW.on_takeover NOT IN ('deliver', 'discard', 'review')
    OR NEW.require_seal NOT IN (0, 1) OR NEW.max_jump NOT BETWEEN 1 AND 4611686018427387904
    OR NEW.max_payload NOT BETWEEN 1 AND 1000000000 OR NEW.key_retention NOT BETWEEN 0 AND 3153600000000
BEGIN SELECT RAISE(ABORT, 'FP003 illegal value'); END;

CREATE TRIGGER outbox_dispatcher_new BEFORE INSERT ON outbox_dispatcher BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_dispatcher_rise BEFORE UPDATE ON outbox_dispatcher WHEN NEW.one IS NOT 1 OR NEW.epoch IS NULL OR NEW.epoch < OLD.epoch
    OR NEW.attempts IS NULL OR NEW.attempts < OLD.attempts OR NEW.attempts_pruned IS NULL OR NEW.attempts_pruned < OLD.attempts_pruned
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_dispatcher_keep BEFORE DELETE ON outbox_dispatcher BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;

CREATE TRIGGER outbox_meta_new BEFORE INSERT ON outbox_meta BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_meta_rise BEFORE UPDATE ON outbox_meta WHEN NEW.one IS NOT 1 OR NEW.major < OLD.major OR (NEW.major = OLD.major AND NEW.minor < OLD.minor)
    -- Only a copy becomes a database of its own.
    OR NEW.uuid IS NULL OR (NEW.uuid <> OLD.uuid AND NOT EXISTS (SELECT 1 FROM outbox_dispatcher WHERE copied_ms IS NOT NULL))
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_meta_keep BEFORE DELETE ON outbox_meta BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;

-- A pause is lifted by a DELETE alone.
CREATE TRIGGER outbox_pause_new BEFORE INSERT ON outbox_pause
  WHEN EXISTS (SELECT 1 FROM outbox_pause WHERE kind = NEW.kind AND destination = NEW.destination AND scope = NEW.scope)
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_pause_legal BEFORE INSERT ON outbox_pause WHEN NEW.kind IS NULL OR NEW.destination IS NULL OR NEW.scope IS NULL
    OR NEW.at_ms IS NULL OR NEW.who IS NULL OR NEW.reason IS NULL
BEGIN SELECT RAISE(ABORT, 'FP003 illegal value'); END;
CREATE TRIGGER outbox_pause_same BEFORE UPDATE ON outbox_pause WHEN NEW.kind IS NOT OLD.kind OR NEW.destination IS NOT OLD.destination OR NEW.scope IS NOT OLD.scope
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
-- Remembered is a final command, with the key that it kept.
CREATE TRIGGER outbox_used_new BEFORE INSERT ON outbox_used WHEN EXISTS (SELECT 1 FROM outbox_used WHERE id = NEW.id)
    OR NOT EXISTS (SELECT 1 FROM outbox_state x WHERE x.n = coalesce((SELECT n FROM outbox WHERE id = NEW.id), (SELECT n FROM outbox_state WHERE minted_id = NEW.id))
      AND x.scope = NEW.scope AND x.key IS NEW.key AND x.state IN ('delivered', 'dead'))
BEGIN SELECT RAISE(ABORT, 'FP005 id exists with other content'); END;
CREATE TRIGGER outbox_used_same BEFORE UPDATE ON outbox_used WHEN (NEW.id IS OLD.id AND NEW.scope IS OLD.scope AND NEW.key IS OLD.key
    AND NEW.sha256 IS OLD.sha256 AND NEW.until_ms >= OLD.until_ms) IS NOT TRUE
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
-- An id is remembered as long as its command is there, and until its time is over.
CREATE TRIGGER outbox_used_keep BEFORE DELETE ON outbox_used WHEN OLD.until_ms > CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    OR EXISTS (SELECT 1 FROM outbox WHERE id = OLD.id) OR EXISTS (SELECT 1 FROM outbox_state WHERE minted_id = OLD.id)
BEGIN SELECT RAISE(ABORT, 'FP007 command is live'); END;
-- The feed is only added to at its end and taken away at its front.
CREATE TRIGGER outbox_event_new BEFORE INSERT ON outbox_event WHEN NEW.n IS NOT NULL AND NEW.n <> -1
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_event_end AFTER INSERT ON outbox_event WHEN NEW.n < 1
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_event_same BEFORE UPDATE ON outbox_event BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_event_front BEFORE DELETE ON outbox_event WHEN EXISTS (SELECT 1 FROM outbox_event WHERE n < OLD.n)
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;

CREATE TRIGGER outbox_refusal_new BEFORE INSERT ON outbox_refusal WHEN EXISTS (SELECT 1 FROM outbox_refusal WHERE scope = NEW.scope)
BEGIN SELECT RAISE(ABORT, 'FP008 number may not fall'); END;
CREATE TRIGGER outbox_audit_new BEFORE INSERT ON outbox_audit WHEN EXISTS (SELECT 1 FROM outbox_audit WHERE n = NEW.n)
BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_audit_same BEFORE UPDATE ON outbox_audit BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
CREATE TRIGGER outbox_audit_keep BEFORE DELETE ON outbox_audit BEGIN SELECT RAISE(ABORT, 'FP006 command is immutable'); END;
