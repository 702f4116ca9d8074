-- Onward on SQLite, schema 1. Read from top to bottom; the reasons stand above each part.
-- Times are seconds since the epoch; ids are UUIDs as text; lists are JSON. STRICT: a column takes what it is of, and nothing
-- else. What no type keeps out of a time is refused by name: a number without an end (9e999).

CREATE TABLE onward_migration (
    version    INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    applied_at REAL NOT NULL
) STRICT;

-- One row per process start that runs jobs. It has one lease for all its jobs.
CREATE TABLE onward_worker (
    id          TEXT PRIMARY KEY,
    name        TEXT NOT NULL,
    host        TEXT NOT NULL,
    pid         INTEGER NOT NULL,
    version     TEXT NOT NULL,
    state       TEXT NOT NULL CHECK (state IN ('active', 'draining', 'stopped', 'lost')),
    queues      TEXT NOT NULL,
    tasks       TEXT NOT NULL,
    concurrency INTEGER NOT NULL CHECK (concurrency > 0),
    idle        INTEGER NOT NULL DEFAULT 1,
    lease_until REAL NOT NULL,
    started_at  REAL NOT NULL,
    beat_at     REAL NOT NULL,
    ended_at    REAL,
    reason      TEXT,
    lock_path   TEXT,
    CONSTRAINT worker_end CHECK ((state IN ('stopped', 'lost')) = (ended_at IS NOT NULL)),
    CONSTRAINT worker_times CHECK (max(lease_until, beat_at) < 9e999 AND min(lease_until, beat_at) > -9e999)
) STRICT;

-- The live table holds what may still move, dead included. Claims touch nothing else, so they do not slow down as
-- history grows.
CREATE TABLE onward_job (
    id           TEXT NOT NULL PRIMARY KEY,
    task         TEXT NOT NULL CHECK (task <> ''),
    queue        TEXT NOT NULL CHECK (queue <> ''),
    priority     INTEGER NOT NULL CHECK (priority BETWEEN -100 AND 100),
    state        TEXT NOT NULL CHECK (state IN ('waiting', 'queued', 'running', 'cancelling', 'dead')),
    attempt      INTEGER NOT NULL CHECK (attempt >= 1),
    run_at       REAL NOT NULL,
    worker       TEXT,
    started_at   REAL,
    finished_at  REAL,
    created_at   REAL NOT NULL,
    max_attempts INTEGER NOT NULL CHECK (max_attempts >= 1),
    max_losses   INTEGER NOT NULL CHECK (max_losses >= 0),
    failures     INTEGER NOT NULL CHECK (failures BETWEEN 0 AND max_attempts),
    losses       INTEGER NOT NULL CHECK (losses BETWEEN 0 AND max_losses + 1),
    budget_from  INTEGER NOT NULL CHECK (budget_from BETWEEN 1 AND attempt),
    timeout      REAL CHECK (timeout > 0),
    args         TEXT NOT NULL,
    CONSTRAINT job_owner CHECK ((state IN ('running', 'cancelling')) = (worker IS NOT NULL)),
    CONSTRAINT job_start CHECK ((state IN ('running', 'cancelling', 'dead')) = (started_at IS NOT NULL)),
    CONSTRAINT job_end   CHECK ((state = 'dead') = (finished_at IS NOT NULL)),
    CONSTRAINT job_time  CHECK (run_at > -9e999 AND run_at < 9e999)
) STRICT;

-- The claim's index: queue, then the highest priority, then the oldest due. `task` is last so that jobs of tasks that a
-- worker does not know are passed over inside the index.
CREATE INDEX onward_job_due ON onward_job (queue, priority DESC, run_at, id, task) WHERE state = 'queued';
CREATE INDEX onward_job_owned ON onward_job (worker, state) WHERE worker IS NOT NULL;
CREATE INDEX onward_job_dead ON onward_job (id) WHERE state = 'dead';

-- The cold table holds what is over. A row is the job together with its last attempt; it is written in the transaction that
-- ends the job, and never updated. `ended_from` and `event` name the last move.
CREATE TABLE onward_finished (
    id           TEXT NOT NULL PRIMARY KEY,
    task         TEXT NOT NULL,
    queue        TEXT NOT NULL,
    priority     INTEGER NOT NULL,
    state        TEXT NOT NULL,
    attempt      INTEGER NOT NULL CHECK (attempt >= 1),
    run_at       REAL NOT NULL,
    worker       TEXT,
    started_at   REAL,
    finished_at  REAL NOT NULL,
    created_at   REAL NOT NULL,
    max_attempts INTEGER NOT NULL,
    max_losses   INTEGER NOT NULL,
    failures     INTEGER NOT NULL,
    losses       INTEGER NOT NULL,
    budget_from  INTEGER NOT NULL,
    timeout      REAL,
    args         TEXT NOT NULL,
    ended_from   TEXT NOT NULL,
    event        TEXT NOT NULL,
    attempt_state TEXT,
    abandoned    INTEGER NOT NULL DEFAULT 0,
    reason       TEXT,
    error        TEXT,
    result       TEXT,
    -- Nearly every row is of the first kind, which is written so that it costs no text.
    CONSTRAINT finished_move CHECK (
        (ended_from IS 'running' AND event IS 'succeed' AND state IS 'succeeded' AND attempt_state IS 'succeeded')
        OR coalesce((ended_from || ' ' || event || ' ' || state || ' ' || attempt_state) IN (
        'waiting cancel cancelled cancelled',
        'waiting expire cancelled cancelled',
        'queued cancel cancelled cancelled',
        'queued expire cancelled cancelled',
        'running drop cancelled cancelled',
        'cancelling succeed succeeded succeeded',
        'cancelling cancel cancelled cancelled',
        'cancelling cancel cancelled failed',
        'cancelling cancel cancelled lost',
        'cancelling cancel cancelled released'
    ), 0) OR (ended_from || ' ' || event || ' ' || state = 'dead discard cancelled' AND attempt_state IS NULL)),
    CONSTRAINT finished_owner CHECK ((ended_from IN ('running', 'cancelling')) = (worker IS NOT NULL)),
    CONSTRAINT finished_result CHECK ((state = 'succeeded') = (result IS NOT NULL))
) STRICT;
CREATE INDEX onward_finished_age ON onward_finished (state, finished_at);

-- History: one record per closed attempt. The last attempt of a finished job stands in `onward_finished`; the others, and
-- the last one of a dead job, stand here. `onward_attempts` shows them all.
CREATE TABLE onward_attempt (
    job        TEXT NOT NULL,
    number     INTEGER NOT NULL CHECK (number >= 1),
    state      TEXT NOT NULL,
    event      TEXT NOT NULL,
    worker     TEXT NOT NULL,
    started_at REAL NOT NULL,
    ended_at   REAL NOT NULL,
    abandoned  INTEGER NOT NULL DEFAULT 0,
    reason     TEXT,
    error      TEXT,
    PRIMARY KEY (job, number),
    CONSTRAINT attempt_end CHECK ((event || ' ' || state) IN (
        'retry failed',
        'snooze released',
        'release released',
        'suspend released',
        'recover lost',
        'bury failed',
        'bury lost'
    ))
) STRICT;

-- Writes that were refused because the job was no longer as its writer saw it. Kept as data, never dropped silently.
CREATE TABLE onward_refusal (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    job           TEXT NOT NULL,
    event         TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    worker        TEXT,
    expected      TEXT NOT NULL,
    found         TEXT,
    found_attempt INTEGER,
    found_worker  TEXT,
    detail        TEXT,
    at            REAL NOT NULL
) STRICT;
CREATE INDEX onward_refusal_job ON onward_refusal (job);

-- Guard three: whatever hand writes, the life of a job is the one in the table. The legal moves stand in the WHEN clauses.
CREATE TRIGGER onward_job_born BEFORE INSERT ON onward_job
WHEN NOT (new.state IN ('waiting', 'queued') AND new.attempt = 1 AND new.failures = 0 AND new.losses = 0)
BEGIN
    SELECT RAISE(ABORT, 'onward: job refuses the birth: a job is inserted only as waiting or queued, with attempt 1');
END;

CREATE TRIGGER onward_job_moves BEFORE UPDATE ON onward_job
WHEN NOT (new.id = old.id AND (
       (old.state = new.state AND new.attempt = old.attempt AND new.worker IS old.worker)
    OR (old.state = 'waiting' AND new.state = 'queued'     AND new.attempt = old.attempt)
    OR (old.state = 'queued'  AND new.state = 'running'    AND new.attempt = old.attempt)
    OR (old.state = 'running' AND new.state = 'queued'     AND new.attempt = old.attempt + 1)
    OR (old.state = 'running' AND new.state = 'waiting'    AND new.attempt = old.attempt + 1)
    OR (old.state = 'running' AND new.state = 'dead'       AND new.attempt = old.attempt)
    OR (old.state = 'running' AND new.state = 'cancelling' AND new.attempt = old.attempt AND new.worker = old.worker)
    OR (old.state = 'dead'    AND new.state = 'queued'     AND new.attempt = old.attempt + 1)
))
BEGIN
    SELECT RAISE(ABORT, 'onward: job refuses the move: onward lifecycle shows every legal one');
END;

-- A live job leaves only into `onward_finished`, and only from the state, the attempt and the owner that it has.
CREATE TRIGGER onward_job_leaves BEFORE DELETE ON onward_job
WHEN NOT EXISTS (
    SELECT 1 FROM onward_finished f
    WHERE f.id = old.id AND f.ended_from = old.state AND f.attempt = old.attempt AND f.worker IS old.worker
)
BEGIN
    SELECT RAISE(ABORT, 'onward: job refuses the delete: a job leaves only into onward_finished');
END;

CREATE TRIGGER onward_finished_is_final BEFORE UPDATE ON onward_finished
BEGIN
    SELECT RAISE(ABORT, 'onward: finished refuses the update: a finished job never changes');
END;

CREATE TRIGGER onward_attempt_is_final BEFORE UPDATE ON onward_attempt
BEGIN
    SELECT RAISE(ABORT, 'onward: attempt refuses the update: a closed attempt never changes');
END;

CREATE TRIGGER onward_worker_moves BEFORE UPDATE OF id, state ON onward_worker
WHEN NOT (new.id = old.id AND (new.state = old.state AND old.state IN ('active', 'draining')
    OR (old.state = 'active'   AND new.state IN ('draining', 'stopped', 'lost'))
    OR (old.state = 'draining' AND new.state IN ('stopped', 'lost'))))
BEGIN
    SELECT RAISE(ABORT, 'onward: worker refuses the move: a worker that ended never comes back');
END;

-- Every read goes through one view of both tables, in one statement.
CREATE VIEW onward_jobs AS
SELECT id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at, max_attempts,
       max_losses, failures, losses, budget_from, timeout, args,
       NULL AS ended_from, NULL AS event, NULL AS reason, NULL AS error, NULL AS result
FROM onward_job
UNION ALL
SELECT id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at, max_attempts,
       max_losses, failures, losses, budget_from, timeout, args, ended_from, event, reason, error, result
FROM onward_finished;

CREATE VIEW onward_attempts AS
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error FROM onward_attempt
UNION ALL
SELECT id, attempt, attempt_state, event, worker, started_at, finished_at, abandoned, reason, error
FROM onward_finished WHERE attempt_state IS NOT NULL;
