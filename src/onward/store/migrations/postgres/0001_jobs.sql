-- Onward on PostgreSQL, schema 1. Read from top to bottom; the reasons stand above each part.
-- `onward` is the name of the schema; another name can be given to the app (`schema=`).

CREATE SCHEMA IF NOT EXISTS onward;

-- The one clock. Every time in these tables is the database's, so that a worker an hour off does no harm. It is the time of
-- the statement, not of its transaction: that may be the caller's, and old when it enqueues.
CREATE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT statement_timestamp()';

CREATE TABLE onward.migration (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per process start that runs jobs. It has one lease for all its jobs.
CREATE TABLE onward.worker (
    id          uuid PRIMARY KEY,
    name        text NOT NULL,
    host        text NOT NULL,
    pid         integer NOT NULL,
    version     text NOT NULL,
    state       text NOT NULL CHECK (state IN ('active', 'draining', 'stopped', 'lost')),
    queues      text[] NOT NULL,
    tasks       text[] NOT NULL,
    concurrency integer NOT NULL CHECK (concurrency > 0),
    idle        boolean NOT NULL DEFAULT true,
    lease_until timestamptz NOT NULL,
    started_at  timestamptz NOT NULL,
    beat_at     timestamptz NOT NULL,
    ended_at    timestamptz,
    reason      text,
    lock_path   text,
    CONSTRAINT worker_end CHECK ((state IN ('stopped', 'lost')) = (ended_at IS NOT NULL)),
    CONSTRAINT worker_times CHECK (isfinite(lease_until) AND isfinite(beat_at))
);
CREATE INDEX worker_live ON onward.worker (state) WHERE state IN ('active', 'draining');

-- What one value may be is said by its type, in both tables of jobs: a row that moves keeps its types. (A CHECK constraint of
-- a table is read anew by every statement that writes, a domain's once a session: eight of them took a fifth of an enqueue.)
CREATE DOMAIN onward.label AS text CHECK (VALUE <> '');
CREATE DOMAIN onward.priority AS smallint CHECK (VALUE BETWEEN -100 AND 100);
CREATE DOMAIN onward.ordinal AS integer CHECK (VALUE >= 1);
CREATE DOMAIN onward.amount AS integer CHECK (VALUE >= 0);
CREATE DOMAIN onward.seconds AS double precision CHECK (VALUE > 0);
CREATE DOMAIN onward.live_state AS text CHECK (VALUE IN ('waiting', 'queued', 'running', 'cancelling', 'dead'));

-- The live table holds what may still move, dead included. Claims touch nothing else, so they do not slow down as
-- history grows. Rows churn, so autovacuum looks often. What its values must be together is said by the triggers
-- `job_born` and `job_moves`, further down.
CREATE TABLE onward.job (
    id           uuid PRIMARY KEY,
    task         onward.label NOT NULL,
    queue        onward.label NOT NULL,
    priority     onward.priority NOT NULL,
    state        onward.live_state NOT NULL,
    attempt      onward.ordinal NOT NULL,
    run_at       timestamptz NOT NULL,
    worker       uuid,
    started_at   timestamptz,
    finished_at  timestamptz,
    created_at   timestamptz NOT NULL,
    max_attempts onward.ordinal NOT NULL,
    max_losses   onward.amount NOT NULL,
    failures     onward.amount NOT NULL,
    losses       onward.amount NOT NULL,
    budget_from  onward.ordinal NOT NULL,
    timeout      onward.seconds,
    args         text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- The claim's index: queue, then the highest priority, then the oldest due.
CREATE INDEX job_due ON onward.job (queue, priority DESC, run_at, id) WHERE state = 'queued';
-- The look's index: the first of each task. A claim begins at the first job of a task that its worker knows, however many
-- others stand in front. (SQLite passes over those inside the claim's index, which PostgreSQL does not.) One direction
-- for all its columns, so that a look goes from one task to the next by comparing rows. Every attempt is at least 1; only the
-- look says so, and thus no other statement can be planned through this index: without statistics a claim would be.
CREATE INDEX job_first ON onward.job (queue, (-priority), task, run_at) WHERE state = 'queued' AND attempt >= 1;
CREATE INDEX job_owned ON onward.job (worker, state) WHERE worker IS NOT NULL;
CREATE INDEX job_dead ON onward.job (id) WHERE state = 'dead';

-- One new job: what `enqueue` in the statements does for many. A function, because its plans are kept by the session: to
-- parse and to plan the INSERT takes as long as the INSERT, and a prepared statement does not pass through every pooler.
-- It answers whether a worker waits to be woken: 0 nobody, 1 somebody is told with this commit, 2 the caller has to. A NOTIFY
-- holds a lock of the whole server until its commit is on the disk, so of all that enqueue at once only one notifies within
-- its transaction, the one that has the advisory lock; the others do it apart. So nobody's commit waits for another's.
CREATE FUNCTION onward.enqueue(id uuid, task text, queue text, priority smallint, args text, max_attempts integer,
    max_losses integer, timeout float8, run_at float8, delay float8, wake boolean) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE channel text;
BEGIN
    INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                            failures, losses, budget_from, timeout, args)
    VALUES ($1, $2, $3, $4, 'queued', 1,
            greatest(onward.clock() + greatest($10, 0) * interval '1 second', to_timestamp($9)), onward.clock(),
            $6, $7, 0, 0, 1, $8, $5);
    IF NOT EXISTS (SELECT 1 FROM onward.worker WHERE state = 'active' AND idle) THEN
        RETURN 0;
    END IF;
    channel := 'onward_' || trim(BOTH '"' FROM split_part('onward.job', '.', 1));
    IF NOT $11 OR NOT pg_try_advisory_xact_lock(hashtext(channel), 0) THEN
        RETURN 2;
    END IF;
    PERFORM pg_notify(channel, json_build_array($3, $4)::text);
    RETURN 1;
END $$;

-- queued > running for up to `most` due jobs of one lane, of tasks that the claimer knows, from where its last claim ended. A
-- function for the same reason: to parse and to plan this took longer than to do it. The session keeps one plan for all values
-- (left alone, a server makes a new one each time: it takes a limit that it does not know for a tenth of the table), and the
-- plan of a day with few jobs must serve a day with many: no table is read from end to end. Rows are named by their
-- places, which cannot change while they are locked; one that has changed since the statement began is left for the next
-- look. The list of places is an array, not a subquery: `IN (SELECT ... FOR UPDATE SKIP LOCKED)` makes the planner join the
-- whole table. The state is asked for once more as `state || ''`: as it stands in the index's condition, a planner reads
-- that whole index beside the places, with every claim. A worker that is no longer active claims nothing.
CREATE FUNCTION onward.claim(claimer uuid, known text, lane_queue text, lane_priority smallint, after_time float8,
    after_id uuid, most integer) RETURNS SETOF onward.job LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
BEGIN
    RETURN QUERY
    UPDATE onward.job SET state = 'running', worker = claimer, started_at = onward.clock()
    WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM onward.job
            WHERE state = 'queued' AND queue = lane_queue AND priority = lane_priority
              AND (run_at, id) > (to_timestamp(after_time), after_id)
              AND run_at <= onward.clock()
              AND task = ANY(ARRAY(SELECT value FROM json_array_elements_text(CAST(known AS json))))
            ORDER BY run_at, id LIMIT most FOR UPDATE SKIP LOCKED))
      AND state || '' = 'queued'
      AND EXISTS (SELECT 1 FROM onward.worker WHERE id = claimer AND state = 'active')
    RETURNING job.*;
END $$;

-- The cold table holds what is over. A row is the job together with its last attempt; it is written in the statement that
-- ends the job, and never updated. `ended_from` and `event` name the last move.
CREATE TABLE onward.finished (
    id           uuid PRIMARY KEY,
    task         onward.label NOT NULL,
    queue        onward.label NOT NULL,
    priority     onward.priority NOT NULL,
    state        text NOT NULL,
    attempt      onward.ordinal NOT NULL,
    run_at       timestamptz NOT NULL,
    worker       uuid,
    started_at   timestamptz,
    finished_at  timestamptz NOT NULL,
    created_at   timestamptz NOT NULL,
    max_attempts onward.ordinal NOT NULL,
    max_losses   onward.amount NOT NULL,
    failures     onward.amount NOT NULL,
    losses       onward.amount NOT NULL,
    budget_from  onward.ordinal NOT NULL,
    timeout      onward.seconds,
    args         text NOT NULL,
    ended_from   text NOT NULL,
    event        text NOT NULL,
    attempt_state text,
    abandoned    boolean NOT NULL DEFAULT false,
    reason       text,
    error        text,
    result       text,
    -- From where, by which event, to where, and how the attempt ended with it.
    CONSTRAINT finished_move CHECK (ended_from || ' ' || event || ' > ' || state || ' ' || coalesce(attempt_state, 'none') IN (
        'waiting cancel > cancelled cancelled',
        'waiting expire > cancelled cancelled',
        'queued cancel > cancelled cancelled',
        'queued expire > cancelled cancelled',
        'running succeed > succeeded succeeded',
        'running drop > cancelled cancelled',
        'cancelling succeed > succeeded succeeded',
        'cancelling cancel > cancelled cancelled',
        'cancelling cancel > cancelled failed',
        'cancelling cancel > cancelled lost',
        'cancelling cancel > cancelled released',
        'dead discard > cancelled none')
        AND (ended_from = 'dead') = (attempt_state IS NULL)),
    CONSTRAINT finished_owner CHECK ((ended_from IN ('running', 'cancelling')) = (worker IS NOT NULL)),
    CONSTRAINT finished_result CHECK ((state = 'succeeded') = (result IS NOT NULL))
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);
CREATE INDEX finished_age ON onward.finished (state, finished_at);

-- History: one record per closed attempt. The last attempt of a finished job stands in `finished`; the others, and the last
-- one of a dead job, stand here. `onward.attempts` shows them all.
CREATE TABLE onward.attempt (
    job        uuid NOT NULL,
    number     integer NOT NULL CHECK (number >= 1),
    state      text NOT NULL,
    event      text NOT NULL,
    worker     uuid NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at   timestamptz NOT NULL,
    abandoned  boolean NOT NULL DEFAULT false,
    reason     text,
    error      text,
    PRIMARY KEY (job, number),
    CONSTRAINT attempt_end CHECK ((event, state) IN (
        ('retry',   'failed'),
        ('snooze',  'released'),
        ('release', 'released'),
        ('suspend', 'released'),
        ('recover', 'lost'),
        ('bury',    'failed'),
        ('bury',    'lost')
    ))
);

-- Writes that were refused because the job was no longer as its writer saw it. Kept as data, never dropped silently.
CREATE TABLE onward.refusal (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job           uuid NOT NULL,
    event         text NOT NULL,
    attempt       integer NOT NULL,
    worker        uuid,
    expected      text NOT NULL,
    found         text,
    found_attempt integer,
    found_worker  uuid,
    detail        text,
    at            timestamptz NOT NULL
);
CREATE INDEX refusal_job ON onward.refusal (job);

-- A batch of jobs of one owner that all end by the same move: `finish` of the statements, whose words say how. Each row leaves
-- the live table for the cold one together with its last attempt, in one statement, if it is still as it was seen. A function
-- like `claim`: to parse and to plan took half of the end of one job. Its kept plan must be right for one and for a thousand,
-- in tables of any size: each is looked up by its id, whatever a planner thinks of reading the table instead. Owner and state
-- are columns of the batch: as constants they make it expect one row of all, and begin with that.
CREATE FUNCTION onward.finish(batch text, owner uuid, expected text, becomes text, last_event text, ended_as text)
    RETURNS SETOF uuid LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN QUERY
    WITH c AS MATERIALIZED (
        SELECT CAST(value ->> 0 AS uuid) AS id, CAST(value ->> 1 AS integer) AS attempt, value ->> 2 AS result,
               value ->> 3 AS error, value ->> 4 AS reason, coalesce(CAST(value ->> 5 AS boolean), false) AS abandoned,
               owner AS worker, expected AS state
        FROM jsonb_array_elements(CAST(batch AS jsonb))
    ), leaving AS (
        DELETE FROM onward.job AS j USING c
        WHERE j.id = c.id AND j.state = c.state AND j.attempt = c.attempt AND j.worker IS NOT DISTINCT FROM c.worker
        RETURNING j.id, j.task, j.queue, j.priority, j.attempt, j.run_at, j.worker, j.started_at, j.created_at, j.max_attempts,
            j.max_losses, j.failures, j.losses, j.budget_from, j.timeout, j.args, j.state, c.abandoned, c.reason, c.error, c.result
    )
    INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
                                 max_attempts, max_losses, failures, losses, budget_from, timeout, args,
                                 ended_from, event, attempt_state, abandoned, reason, error, result)
    SELECT id, task, queue, priority, becomes, attempt, run_at, worker, started_at, onward.clock(), created_at,
           max_attempts, max_losses, failures, losses, budget_from, timeout, args,
           state, last_event, ended_as, abandoned, reason, error, result
    FROM leaving
    RETURNING finished.id;
END $$;

-- Guard three: whatever hand writes, the life of a job is the one in the table. Rows are looked at when all other triggers have
-- had their say (AFTER). The legal moves stand in the WHEN clause, so a legal move calls no function. A birth does: it is
-- checked by a function whose plan the session keeps, because an enqueue is often a statement of one row, and a WHEN
-- clause is read anew by each statement.
CREATE FUNCTION onward.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'onward: % refuses % > % (attempt % > %) of %', TG_TABLE_NAME,
        to_jsonb(OLD) ->> 'state', to_jsonb(NEW) ->> 'state', to_jsonb(OLD) ->> 'attempt', to_jsonb(NEW) ->> 'attempt',
        coalesce(to_jsonb(OLD) ->> 'id', to_jsonb(OLD) ->> 'job')
        USING ERRCODE = 'check_violation', HINT = 'onward lifecycle shows every legal move';
END $$;

CREATE FUNCTION onward.refuse_job() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    begun boolean := NEW.state NOT IN ('waiting', 'queued');
    wrong text := CASE
        WHEN NEW.id <> OLD.id THEN 'another id'
        WHEN begun <> (NEW.started_at IS NOT NULL) THEN CASE WHEN begun THEN 'no start' ELSE 'a start' END
        WHEN (NEW.state = 'dead') <> (NEW.finished_at IS NOT NULL)
            THEN CASE WHEN NEW.state = 'dead' THEN 'no end' ELSE 'an end' END
        WHEN (NEW.worker IS NULL) <> (NEW.started_at IS NULL OR NEW.finished_at IS NOT NULL)
            THEN CASE WHEN NEW.worker IS NULL THEN 'no owner' ELSE 'an owner' END
        WHEN NEW.failures > NEW.max_attempts THEN 'more failures than max_attempts'
        WHEN NEW.losses - 1 > NEW.max_losses THEN 'more losses than max_losses and one'
        WHEN NEW.budget_from > NEW.attempt THEN 'budgets from a later attempt'
        WHEN NOT isfinite(NEW.run_at) THEN 'a due time that never comes or always was' END;
BEGIN
    RAISE EXCEPTION 'onward: job refuses % > % (attempt % > %) of %', OLD.state, NEW.state, OLD.attempt, NEW.attempt,
        OLD.id || coalesce(', with ' || wrong, '')
        USING ERRCODE = 'check_violation', HINT = 'onward lifecycle shows every legal move';
END $$;

CREATE FUNCTION onward.check_birth() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.state IN ('waiting', 'queued') AND new.attempt = 1 AND new.budget_from = 1 AND new.failures = 0 AND new.losses = 0
        AND num_nonnulls(new.worker, new.started_at, new.finished_at) = 0 AND isfinite(new.run_at)
    THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'onward: job refuses nothing > % (attempt %) of %', new.state, new.attempt, new.id
        USING ERRCODE = 'check_violation',
              HINT = 'a job is born waiting or queued, due at a real time, on its first attempt, and owned by nobody';
END $$;

CREATE TRIGGER job_born AFTER INSERT ON onward.job FOR EACH ROW EXECUTE FUNCTION onward.check_birth();

-- First the moves, each with the number of attempts that it mints; a row that stays in its state keeps its attempt and its
-- owner. Then what must be true in each state: who is owned has begun, who is dead has ended. Then the budgets, and a due
-- time that is one: nothing can be reckoned with infinity.
CREATE TRIGGER job_moves AFTER UPDATE ON onward.job FOR EACH ROW
WHEN (new.id <> old.id
    OR new.attempt - old.attempt IS DISTINCT FROM CASE old.state || ' > ' || new.state
        WHEN 'waiting > queued'     THEN 0
        WHEN 'queued > running'     THEN 0
        WHEN 'running > queued'     THEN 1
        WHEN 'running > waiting'    THEN 1
        WHEN 'running > dead'       THEN 0
        WHEN 'running > cancelling' THEN CASE WHEN new.worker = old.worker THEN 0 END
        WHEN 'dead > queued'        THEN 1
        ELSE CASE WHEN new.state = old.state AND new.worker IS NOT DISTINCT FROM old.worker THEN 0 END END
    OR (new.state IN ('waiting', 'queued')) <> (new.started_at IS NULL)
    OR (new.state = 'dead') <> (new.finished_at IS NOT NULL)
    OR (new.worker IS NULL) <> (new.started_at IS NULL OR new.finished_at IS NOT NULL)
    OR new.failures > new.max_attempts OR new.losses - 1 > new.max_losses OR new.budget_from > new.attempt
    OR NOT isfinite(new.run_at))
EXECUTE FUNCTION onward.refuse_job();
-- Also where changes are replayed or triggers are passed by (`session_replication_role`): legal ones pass here. A copy of a
-- table does bring rows that are under way, so births are checked only where they happen.
ALTER TABLE onward.job ENABLE ALWAYS TRIGGER job_moves;

-- A live job leaves only into `finished`, and only from the state, the attempt and the owner that it has. Checked once a
-- statement, when the statement's inserts are visible. Each is looked up by its id: a session that keeps the plan of a day
-- when `finished` was small would else read it from end to end when it has grown.
CREATE FUNCTION onward.refuse_loss() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE stray onward.job;
BEGIN
    SELECT gone.* INTO stray FROM gone LEFT JOIN onward.finished f ON f.id = gone.id
    WHERE f.id IS NULL OR f.ended_from <> gone.state OR f.attempt <> gone.attempt
       OR f.worker IS DISTINCT FROM gone.worker LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'onward: job refuses % > nothing (attempt %) of %: a job leaves only into finished',
            stray.state, stray.attempt, stray.id
            USING ERRCODE = 'check_violation', HINT = 'onward job cancel, onward dead discard';
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER job_leaves AFTER DELETE ON onward.job REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION onward.refuse_loss();

CREATE TRIGGER finished_is_final BEFORE UPDATE ON onward.finished FOR EACH ROW EXECUTE FUNCTION onward.refuse();
CREATE TRIGGER attempt_is_final BEFORE UPDATE ON onward.attempt FOR EACH ROW EXECUTE FUNCTION onward.refuse();

CREATE TRIGGER worker_moves AFTER UPDATE OF id, state ON onward.worker FOR EACH ROW
WHEN (NOT (new.id = old.id AND (new.state = old.state AND old.state IN ('active', 'draining')
    OR (old.state = 'active'   AND new.state IN ('draining', 'stopped', 'lost'))
    OR (old.state = 'draining' AND new.state IN ('stopped', 'lost')))))
EXECUTE FUNCTION onward.refuse();

-- Every read goes through one view of both tables, in one statement. Both sides have the same types, or a condition on a
-- column would not reach the tables and their indexes.
CREATE VIEW onward.jobs AS
SELECT id, task, queue, priority, CAST(state AS text) AS state, attempt, run_at, worker, started_at, finished_at, created_at,
       max_attempts, max_losses, failures, losses, budget_from, timeout, args,
       NULL::text AS ended_from, NULL::text AS event, NULL::text AS reason, NULL::text AS error, NULL::text AS result
FROM onward.job
UNION ALL
SELECT id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at, max_attempts,
       max_losses, failures, losses, budget_from, timeout, args, ended_from, event, reason, error, result
FROM onward.finished;

CREATE VIEW onward.attempts AS
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error FROM onward.attempt
UNION ALL
SELECT id, attempt, attempt_state, event, worker, started_at, finished_at, abandoned, reason, error
FROM onward.finished WHERE attempt_state IS NOT NULL;
