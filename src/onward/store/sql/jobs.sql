-- The life of a job in SQL: enqueue, claim, apply. Every write names the state, the attempt and the owner that it expects,
-- and returns the ids that took; a row that was no longer so is left alone.
-- Twins stand side by side: `both`, or `sqlite` and `postgres`. `:name` is a parameter. Batches come as one JSON text, so
-- that a batch is one statement and every driver can carry it.

-- name: enqueue
-- The first try is a plain INSERT: an id that is there already is an error. A due time is never earlier than now, so that
-- nothing lands behind the claim's position for longer than a commit takes. A job is an array, its fields in the order of
-- `NewJob`: both databases read that several times faster than an object. The answer says whether some worker is idle
-- and wants to be woken; the wake-up itself is never part of this transaction.
-- sqlite
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, timeout, args)
SELECT n.id, n.task, n.queue, n.priority, 'queued', 1,
       max(onward.clock() + max(coalesce(n.delay, 0), 0), coalesce(n.run_at, 0)), onward.clock(),
       n.max_attempts, n.max_losses, 0, 0, 1, n.timeout, n.args
FROM (SELECT value ->> 0 AS id, value ->> 1 AS task, value ->> 2 AS queue, value ->> 3 AS priority, value ->> 4 AS args,
             value ->> 5 AS max_attempts, value ->> 6 AS max_losses, value ->> 7 AS timeout, value ->> 8 AS run_at,
             value ->> 9 AS delay
      FROM json_each(:jobs)) AS n
-- postgres
WITH born AS (
    INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                            failures, losses, budget_from, timeout, args)
    SELECT n.id, n.task, n.queue, n.priority, 'queued', 1,
           greatest(onward.clock() + greatest(n.delay, 0) * interval '1 second', to_timestamp(n.run_at)), onward.clock(),
           n.max_attempts, n.max_losses, 0, 0, 1, n.timeout, n.args
    FROM (SELECT CAST(value ->> 0 AS uuid) AS id, value ->> 1 AS task, value ->> 2 AS queue,
                 CAST(value ->> 3 AS smallint) AS priority, value ->> 4 AS args, CAST(value ->> 5 AS integer) AS max_attempts,
                 CAST(value ->> 6 AS integer) AS max_losses, CAST(value ->> 7 AS float8) AS timeout,
                 CAST(value ->> 8 AS float8) AS run_at, CAST(value ->> 9 AS float8) AS delay
          FROM jsonb_array_elements(CAST(:jobs AS jsonb))) AS n
)
SELECT EXISTS (SELECT 1 FROM onward.worker WHERE state = 'active' AND idle)

-- name: enqueue_alike
-- The same for jobs that differ in nothing but id, arguments and time, as those of one bulk mostly do: what they have in
-- common is read once. That takes a sixth less of either database.
-- sqlite
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, timeout, args)
SELECT n.id, :alike ->> 'task', :alike ->> 'queue', :alike ->> 'priority', 'queued', 1,
       max(onward.clock() + max(coalesce(n.delay, 0), 0), coalesce(n.run_at, 0)), onward.clock(),
       :alike ->> 'max_attempts', :alike ->> 'max_losses', 0, 0, 1, :alike ->> 'timeout', n.args
FROM (SELECT value ->> 0 AS id, value ->> 1 AS args, value ->> 2 AS run_at, value ->> 3 AS delay
      FROM json_each(:jobs)) AS n
-- postgres
WITH born AS (
    INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                            failures, losses, budget_from, timeout, args)
    SELECT n.id, a.task, a.queue, a.priority, 'queued', 1,
           greatest(onward.clock() + greatest(n.delay, 0) * interval '1 second', to_timestamp(n.run_at)), onward.clock(),
           a.max_attempts, a.max_losses, 0, 0, 1, a.timeout, n.args
    FROM json_to_record(CAST(:alike AS json)) AS a (task text, queue text, priority smallint, max_attempts integer,
             max_losses integer, timeout float8),
         (SELECT CAST(value ->> 0 AS uuid) AS id, value ->> 1 AS args, CAST(value ->> 2 AS float8) AS run_at,
                 CAST(value ->> 3 AS float8) AS delay
          FROM jsonb_array_elements(CAST(:jobs AS jsonb))) AS n
)
SELECT EXISTS (SELECT 1 FROM onward.worker WHERE state = 'active' AND idle)

-- name: enqueue_one
-- The same for one job, with plain parameters. On PostgreSQL it is a function in the schema, which may also wake a worker:
-- see there. It says what its arguments are, so only what a driver may send as something wider is cast.
-- sqlite
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, timeout, args)
VALUES (:id, :task, :queue, :priority, 'queued', 1,
        max(onward.clock() + max(coalesce(:delay, 0), 0), coalesce(:run_at, 0)), onward.clock(),
        :max_attempts, :max_losses, 0, 0, 1, :timeout, :args)
-- postgres
SELECT onward.enqueue(CAST(:id AS uuid), :task, :queue, CAST(:priority AS smallint), :args, CAST(:max_attempts AS integer),
                      CAST(:max_losses AS integer), :timeout, :run_at, :delay, :wake)

-- name: enqueue_again
-- Only the repeat of an enqueue whose answer was lost, or one with an id of the caller's, may meet itself. A job that has
-- ended meanwhile is in the cold table, which the caller asks next, in the same transaction.
-- sqlite
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, timeout, args)
SELECT n.id, n.task, n.queue, n.priority, 'queued', 1,
       max(onward.clock() + max(coalesce(n.delay, 0), 0), coalesce(n.run_at, 0)), onward.clock(),
       n.max_attempts, n.max_losses, 0, 0, 1, n.timeout, n.args
FROM (SELECT value ->> 0 AS id, value ->> 1 AS task, value ->> 2 AS queue, value ->> 3 AS priority, value ->> 4 AS args,
             value ->> 5 AS max_attempts, value ->> 6 AS max_losses, value ->> 7 AS timeout, value ->> 8 AS run_at,
             value ->> 9 AS delay
      FROM json_each(:jobs)) AS n
WHERE NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = n.id)
ON CONFLICT (id) DO NOTHING
RETURNING id
-- postgres
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, timeout, args)
SELECT n.id, n.task, n.queue, n.priority, 'queued', 1,
       greatest(onward.clock() + greatest(n.delay, 0) * interval '1 second', to_timestamp(n.run_at)), onward.clock(),
       n.max_attempts, n.max_losses, 0, 0, 1, n.timeout, n.args
FROM (SELECT CAST(value ->> 0 AS uuid) AS id, value ->> 1 AS task, value ->> 2 AS queue,
             CAST(value ->> 3 AS smallint) AS priority, value ->> 4 AS args, CAST(value ->> 5 AS integer) AS max_attempts,
             CAST(value ->> 6 AS integer) AS max_losses, CAST(value ->> 7 AS float8) AS timeout,
             CAST(value ->> 8 AS float8) AS run_at, CAST(value ->> 9 AS float8) AS delay
      FROM jsonb_array_elements(CAST(:jobs AS jsonb))) AS n
WHERE NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = n.id)
ON CONFLICT (id) DO NOTHING
RETURNING CAST(id AS text)

-- name: finished_among
-- Which of these ids are over: the second look of a repeated enqueue. A job that ended between the two statements is seen
-- here, because each statement of a READ COMMITTED transaction sees what has been committed before it.
-- sqlite
SELECT id FROM onward.finished WHERE id IN (SELECT value FROM json_each(:ids))
-- postgres
SELECT CAST(id AS text) FROM onward.finished
WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))

-- name: calls
-- What is called by these jobs, wherever they stand: whether a repeated enqueue is a repeat.
-- sqlite
SELECT id, task, args FROM onward.jobs WHERE id IN (SELECT value FROM json_each(:ids))
-- postgres
SELECT CAST(id AS text), task, args FROM onward.jobs
WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))

-- name: lanes
-- Which (queue, priority) pairs have queued jobs, highest priority first, the due time of the first of each, and in how many
-- seconds that is. PostgreSQL says so for each task, for whose sake see the index; SQLite for all of them, as NULL. A loose
-- index scan: one probe a pair, however many jobs are scheduled for tomorrow. Of an array PostgreSQL expects ten rows, of a
-- function a hundred, and then ten thousand pairs: for those it would compile each look (JIT), for 90 ms. A due time that is
-- none, stored past all rules, fails no look: PostgreSQL subtracts numbers, for which infinity is one too, and what is no
-- number in SQLite sorts behind all of them and is never due.
-- sqlite
WITH RECURSIVE lane (queue, priority) AS (
    SELECT q.value, (SELECT max(priority) FROM onward.job WHERE state = 'queued' AND queue = q.value)
    FROM json_each(:queues) AS q
    UNION ALL
    SELECT lane.queue, (SELECT max(priority) FROM onward.job
                        WHERE state = 'queued' AND queue = lane.queue AND priority < lane.priority)
    FROM lane WHERE lane.priority IS NOT NULL
), first (queue, priority, run_at) AS MATERIALIZED (
    SELECT queue, priority, (SELECT min(run_at) FROM onward.job
                             WHERE state = 'queued' AND queue = lane.queue AND priority = lane.priority)
    FROM lane WHERE priority IS NOT NULL
)
SELECT queue, priority, NULL, run_at, run_at - onward.clock() FROM first WHERE run_at < 9e999 ORDER BY priority DESC
-- postgres
WITH RECURSIVE first (queue, priority, task, run_at) AS (
    SELECT q.value, j.priority, j.task, j.run_at
    FROM unnest(ARRAY(SELECT json_array_elements_text(CAST(:queues AS json)))) AS q (value)
    CROSS JOIN LATERAL (SELECT priority, task, run_at FROM onward.job
                        WHERE state = 'queued' AND attempt >= 1 AND queue = q.value
                        ORDER BY -priority, task, run_at LIMIT 1) AS j
    UNION ALL
    SELECT f.queue, j.priority, j.task, j.run_at
    FROM first AS f
    CROSS JOIN LATERAL (SELECT priority, task, run_at FROM onward.job
                        WHERE state = 'queued' AND attempt >= 1 AND queue = f.queue
                          AND (-priority, task) > (-f.priority, f.task)
                        ORDER BY -priority, task, run_at LIMIT 1) AS j
)
SELECT queue, priority, task, CAST(extract(epoch FROM run_at) AS float8),
       CAST(extract(epoch FROM run_at) AS float8) - CAST(extract(epoch FROM onward.clock()) AS float8)
FROM first ORDER BY priority DESC

-- name: claim
-- queued > running for up to :limit due jobs of one lane, of tasks that this worker knows, from where the last claim ended.
-- What the caller knows is not returned: lane, state and owner. A worker that is no longer active claims nothing. On
-- PostgreSQL it is a function in the schema, whose plan the session keeps: see there.
-- sqlite
UPDATE onward.job SET state = 'running', worker = :worker, started_at = onward.clock()
WHERE id IN (SELECT id FROM onward.job
             WHERE state = 'queued' AND queue = :queue AND priority = :priority
               AND (run_at, id) > (:after_time, :after_id) AND run_at <= onward.clock()
               AND task IN (SELECT value FROM json_each(:tasks))
             ORDER BY run_at, id LIMIT :limit)
  AND state = 'queued'
  AND EXISTS (SELECT 1 FROM onward.worker WHERE id = :worker AND state = 'active')
RETURNING id, task, attempt, args, max_attempts, max_losses, failures, losses, budget_from, timeout, run_at
-- postgres
SELECT CAST(id AS text), task, attempt, args, max_attempts, max_losses, failures, losses, budget_from, timeout,
       CAST(extract(epoch FROM run_at) AS float8)
FROM onward.claim(CAST(:worker AS uuid), :tasks, :queue, CAST(:priority AS smallint), :after_time, CAST(:after_id AS uuid),
                  CAST(:limit AS integer))

-- name: due
-- What `claim` would take of one lane, without the jobs that are to be left alone: for lanes with a job that refuses to be
-- claimed. Such a job makes a claim of many fail as a whole, whoever makes it.
-- sqlite
SELECT id FROM onward.job
WHERE state = 'queued' AND queue = :queue AND priority = :priority
  AND (run_at, id) > (:after_time, :after_id) AND run_at <= onward.clock()
  AND task IN (SELECT value FROM json_each(:tasks)) AND id NOT IN (SELECT value FROM json_each(:leave))
ORDER BY run_at, id LIMIT :limit
-- postgres
SELECT CAST(id AS text) FROM onward.job
WHERE state = 'queued' AND queue = CAST(:queue AS text) AND priority = CAST(:priority AS smallint)
  AND (run_at, id) > (to_timestamp(CAST(:after_time AS float8)), CAST(:after_id AS uuid))
  AND run_at <= onward.clock()
  AND task = ANY(ARRAY(SELECT value FROM json_array_elements_text(CAST(:tasks AS json))))
  AND id NOT IN (SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:leave AS json)))
ORDER BY run_at, id LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED

-- name: claim_these
-- queued > running for those of these jobs that are still due: one that refuses is found by claiming fewer and fewer.
-- sqlite
UPDATE onward.job SET state = 'running', worker = :worker, started_at = onward.clock()
WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'queued' AND run_at <= onward.clock()
  AND EXISTS (SELECT 1 FROM onward.worker WHERE id = :worker AND state = 'active')
RETURNING id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
          timeout, run_at
-- postgres
UPDATE onward.job SET state = 'running', worker = CAST(:worker AS uuid), started_at = onward.clock()
WHERE id = ANY(ARRAY(
        SELECT id FROM onward.job
        WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))
          AND state = 'queued' AND run_at <= onward.clock()
        FOR UPDATE SKIP LOCKED))
  AND state || '' = 'queued'
  AND EXISTS (SELECT 1 FROM onward.worker WHERE id = CAST(:worker AS uuid) AND state = 'active')
RETURNING CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
          failures, losses, budget_from, timeout, CAST(extract(epoch FROM run_at) AS float8)

-- name: finish
-- running > succeeded, and every other move that ends a job: the row moves from the live table to the cold one together with
-- its last attempt, in one transaction, if it is still as it was seen. A batch is of one kind of move and one owner; its
-- rows are short arrays, which both databases read several times faster than objects; what is not there at their end is NULL.
-- On PostgreSQL it is a function in the schema, whose plan the session keeps: see there.
-- sqlite
INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
                             max_attempts, max_losses, failures, losses, budget_from, timeout, args,
                             ended_from, event, attempt_state, abandoned, reason, error, result)
SELECT j.id, j.task, j.queue, j.priority, :after, j.attempt, j.run_at, j.worker,
       CASE WHEN j.state = 'queued' THEN NULL ELSE j.started_at END, onward.clock(), j.created_at,
       j.max_attempts, j.max_losses, j.failures, j.losses, j.budget_from, j.timeout, j.args,
       j.state, :event, :ended, coalesce(c.abandoned, 0), c.reason, c.error, c.result
FROM (SELECT value ->> 0 AS id, value ->> 1 AS attempt, value ->> 2 AS result, value ->> 3 AS error, value ->> 4 AS reason,
             value ->> 5 AS abandoned
      FROM json_each(:rows)) AS c CROSS JOIN onward.job AS j
WHERE j.id = c.id AND j.state = :before AND j.attempt = c.attempt AND j.worker IS :worker;
DELETE FROM onward.job
WHERE id IN (SELECT value ->> 0 FROM json_each(:rows))
  AND EXISTS (SELECT 1 FROM onward.finished f
              WHERE f.id = onward.job.id AND f.ended_from = onward.job.state AND f.attempt = onward.job.attempt
                AND f.worker IS onward.job.worker)
RETURNING id
-- postgres
SELECT CAST(id AS text)
FROM onward.finish(:rows, CAST(:worker AS uuid), :before, :after, :event, :ended) AS id

-- name: go_on
-- Every move after which the job is still live: running > queued (retry, snooze, release, recover), running > dead,
-- running > cancelling, dead > queued. The attempt that closes is written to history in the same statement.
-- Rows are locked in id order, so that two writers never wait for each other in a circle.
-- sqlite
INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at, abandoned, reason, error)
SELECT j.id, j.attempt, c.value ->> 'ended', c.value ->> 'event', j.worker, j.started_at, onward.clock(),
       c.value ->> 'abandoned', c.value ->> 'reason', c.value ->> 'error'
FROM json_each(:changes) AS c CROSS JOIN onward.job AS j
WHERE j.id = c.value ->> 'id' AND j.state = c.value ->> 'before' AND j.attempt = c.value ->> 'attempt'
  AND j.worker IS c.value ->> 'worker' AND c.value ->> 'ended' IS NOT NULL;
UPDATE onward.job SET
    state = c.value ->> 'after',
    attempt = c.value ->> 'next_attempt',
    run_at = CASE WHEN c.value ->> 'after' = 'queued' THEN onward.clock() + max(coalesce(c.value ->> 'delay', 0), 0)
                  ELSE run_at END,
    worker = CASE WHEN c.value ->> 'after' = 'cancelling' THEN onward.job.worker END,
    started_at = CASE WHEN c.value ->> 'after' IN ('cancelling', 'dead') THEN started_at END,
    finished_at = CASE WHEN c.value ->> 'after' = 'dead' THEN onward.clock() END,
    failures = c.value ->> 'failures',
    losses = c.value ->> 'losses',
    budget_from = c.value ->> 'budget_from'
FROM json_each(:changes) AS c
WHERE onward.job.id = c.value ->> 'id' AND onward.job.state = c.value ->> 'before'
  AND onward.job.attempt = c.value ->> 'attempt' AND onward.job.worker IS c.value ->> 'worker'
RETURNING id
-- postgres
WITH c AS MATERIALIZED (
    SELECT c.* FROM unnest(ARRAY(SELECT json_array_elements(CAST(:changes AS json)))) AS r (value),
        json_to_record(r.value) AS c (id uuid, before text, after text, attempt integer, worker uuid, event text, ended text,
            reason text, error text, abandoned boolean, failures integer, losses integer, next_attempt integer,
            budget_from integer, delay float8)
), seen AS MATERIALIZED (
    SELECT j.id AS job, j.attempt AS number, j.worker AS owner, j.started_at AS start, c.*
    FROM c JOIN onward.job AS j
      ON j.id = c.id AND j.state = c.before AND j.attempt = c.attempt AND j.worker IS NOT DISTINCT FROM c.worker
    ORDER BY j.id FOR UPDATE OF j
), history AS (
    INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at, abandoned, reason, error)
    SELECT job, number, ended, event, owner, start, onward.clock(), abandoned, reason, error
    FROM seen WHERE ended IS NOT NULL
)
UPDATE onward.job AS j SET
    state = s.after,
    attempt = s.next_attempt,
    run_at = CASE WHEN s.after = 'queued' THEN onward.clock() + greatest(s.delay, 0) * interval '1 second'
                  ELSE j.run_at END,
    worker = CASE WHEN s.after = 'cancelling' THEN j.worker END,
    started_at = CASE WHEN s.after IN ('cancelling', 'dead') THEN j.started_at END,
    finished_at = CASE WHEN s.after = 'dead' THEN onward.clock() END,
    failures = s.failures,
    losses = s.losses,
    budget_from = s.budget_from
FROM seen AS s
WHERE j.id = s.id AND j.state = s.before AND j.attempt = s.attempt
RETURNING CAST(j.id AS text)

-- name: hold
-- The retry of an attempt whose body could not be stopped is not due while that body lives: its worker moves the due time
-- on, again and again; when the worker dies nobody does, and the retry goes ahead.
-- sqlite
UPDATE onward.job SET run_at = max(run_at, onward.clock() + :seconds)
WHERE id = :id AND attempt = :attempt AND state = 'queued'
RETURNING id
-- postgres
UPDATE onward.job SET run_at = greatest(run_at, onward.clock() + CAST(:seconds AS float8) * interval '1 second')
WHERE id = CAST(:id AS uuid) AND attempt = :attempt AND state = 'queued'
RETURNING CAST(id AS text)

-- name: refuse
-- Keep a write that was refused: what its writer expected, and what was found instead.
-- sqlite
INSERT INTO onward.refusal (job, event, attempt, worker, expected, found, found_attempt, found_worker, detail, at)
SELECT r.value ->> 'job', r.value ->> 'event', r.value ->> 'attempt', r.value ->> 'worker', r.value ->> 'expected',
       r.value ->> 'found', r.value ->> 'found_attempt', r.value ->> 'found_worker', r.value ->> 'detail', onward.clock()
FROM json_each(:refusals) AS r
-- postgres
INSERT INTO onward.refusal (job, event, attempt, worker, expected, found, found_attempt, found_worker, detail, at)
SELECT r.job, r.event, r.attempt, r.worker, r.expected, r.found, r.found_attempt, r.found_worker, r.detail, onward.clock()
FROM json_to_recordset(CAST(:refusals AS json)) AS r (job uuid, event text, attempt integer, worker uuid, expected text,
     found text, found_attempt integer, found_worker uuid, detail text)
